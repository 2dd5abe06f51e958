// Light or dark: what the reader chose, or else what the system says. Before anything is drawn.
const system = matchMedia("(prefers-color-scheme: dark)");
const remembered = () => { try { return localStorage.getItem("theme"); } catch { return null; } };
const setTheme = () => {
  document.documentElement.dataset.theme = remembered() || (system.matches ? "dark" : "light");
};
setTheme();
system.addEventListener("change", setTheme);

document.addEventListener("DOMContentLoaded", () => {
  document.querySelector(".theme").addEventListener("click", () => {
    const other = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    document.documentElement.dataset.theme = other;
    try { localStorage.setItem("theme", other); } catch { /* files may not remember */ }
  });
  if (matchMedia("(max-width: 800px)").matches) document.querySelector("nav.pages details").open = false;
  document.querySelector("nav.pages [aria-current]")?.scrollIntoView({ block: "nearest" });
  document.querySelectorAll(".block").forEach(addCopyButton);
  addSearch(document.querySelector(".search input"), document.querySelector(".found"));
});

function addCopyButton(block) {
  if (!navigator.clipboard || block.matches(".output, .text")) return;
  const button = document.createElement("button");
  button.className = "copy";
  button.type = "button";
  button.textContent = "Copy";
  button.addEventListener("click", async () => {
    let text = block.querySelector("code").textContent;
    if (block.matches(".console")) {
      text = text.split("\n").filter(line => line.startsWith("$ ")).map(line => line.slice(2)).join("\n");
    }
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  block.append(button);
}

function addSearch(input, list) {
  const clear = () => { list.replaceChildren(); list.hidden = true; };
  input.addEventListener("input", () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    clear();
    if (!words.length || !window.SEARCH_INDEX) return;
    const found = window.SEARCH_INDEX.map(row => [score(row, words), row]).filter(([points]) => points > 0);
    found.sort((a, b) => b[0] - a[0]);
    list.append(...found.slice(0, 12).map(([, row]) => resultOf(row, words)));
    if (!found.length) list.append(Object.assign(document.createElement("li"), { textContent: "Nothing found." }));
    list.hidden = false;
  });
  input.addEventListener("keydown", event => {
    if (event.key === "Escape") { input.value = ""; clear(); }
    if (event.key === "Enter") list.querySelector("a")?.click();
    if (event.key === "ArrowDown") { list.querySelector("a")?.focus(); event.preventDefault(); }
  });
  list.addEventListener("keydown", event => {
    const row = document.activeElement.closest("li");
    const step = { ArrowDown: row?.nextElementSibling, ArrowUp: row?.previousElementSibling }[event.key];
    if (step) { step.querySelector("a")?.focus(); event.preventDefault(); }
  });
  list.addEventListener("click", () => clear());
  document.addEventListener("click", event => { if (!event.target.closest(".search")) clear(); });
  document.addEventListener("keydown", event => {
    if (event.key === "/" && !/input|textarea/i.test(document.activeElement.tagName)) { input.focus(); event.preventDefault(); }
  });
}

// Every word must be there; in a title it counts more, and as a whole word, too.
function score(row, words) {
  const title = (row.title || row.page).toLowerCase(), page = row.page.toLowerCase(), text = row.text.toLowerCase();
  let points = 0;
  for (const word of words) {
    let own = 0;
    if (title.includes(word)) own += title.split(/\W+/).includes(word) ? 30 : 15;
    if (page.includes(word)) own += 5;
    if (text.includes(word)) own += Math.min(5, text.split(word).length - 1);
    if (!own) return 0;
    points += own;
  }
  return points;
}

function resultOf(row, words) {
  const item = document.createElement("li"), link = document.createElement("a"), small = document.createElement("small");
  link.href = row.url;
  link.textContent = row.title ? `${row.page}: ${row.title}` : row.page;
  const at = Math.max(0, row.text.toLowerCase().indexOf(words[0]) - 40);
  const part = row.text.slice(at, at + 140);
  const pattern = new RegExp(`(${words.map(w => w.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")).join("|")})`, "gi");
  part.split(pattern).forEach((piece, i) => {
    small.append(i % 2 ? Object.assign(document.createElement("mark"), { textContent: piece }) : piece);
  });
  link.append(small);
  item.append(link);
  return item;
}
