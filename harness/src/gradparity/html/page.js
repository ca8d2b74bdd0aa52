"use strict";
const finds = [...document.querySelectorAll("details.find")];
const find = (id) => document.getElementById(id);
const [search, verdict, subject, sort, count] = ["search", "verdict", "subject", "sort", "count"].map(find);
const orders = {
  importance: (a, b) => a.dataset.place - b.dataset.place,
  cases: (a, b) => b.dataset.cases - a.dataset.cases,
  case: (a, b) => a.dataset.case.localeCompare(b.dataset.case),
  seconds: (a, b) => b.dataset.seconds - a.dataset.seconds,
};
const shown = () => finds.filter((one) => !one.hidden);
function update() {
  const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
  for (const one of finds) {
    const text = one.textContent.toLowerCase();
    one.hidden = !(words.every((word) => text.includes(word))
      && (!verdict.value || one.dataset.verdict === verdict.value)
      && (!subject.value || one.dataset.subject === subject.value));
  }
  const list = find("list");
  finds.sort(orders[sort.value] || orders.importance).forEach((one) => list.append(one));
  count.textContent = `${shown().length} of ${finds.length}`;
}
function theme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
}
function move(by) {
  const all = shown();
  const at = all.findIndex((one) => one.contains(document.activeElement));
  const next = all[Math.min(Math.max(at + by, 0), all.length - 1)];
  if (next) { next.firstElementChild.focus(); next.scrollIntoView({ block: "nearest" }); }
}
function turn(select) {
  select.selectedIndex = (select.selectedIndex + 1) % select.options.length;
  update();
}
async function copy(button) {
  const text = button.previousElementSibling.textContent;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = document.body.appendChild(document.createElement("textarea"));
    area.value = text;
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  button.textContent = "copied";
  setTimeout(() => { button.textContent = "copy"; }, 1500);
}
const keys = {
  "/": () => search.focus(), j: () => move(1), k: () => move(-1), t: theme, s: () => turn(sort), v: () => turn(verdict),
  b: () => turn(subject), "?": () => find("keys").showModal(),
  c: () => { const button = document.activeElement.closest("details.find")?.querySelector("button.copy"); if (button) copy(button); },
};
if (finds.length) {
  search.addEventListener("input", update);
  [verdict, subject, sort].forEach((each) => each.addEventListener("change", update));
  document.addEventListener("keydown", (event) => {
    const typing = ["INPUT", "SELECT", "TEXTAREA"].includes(event.target.tagName);
    if (event.key === "Escape" && typing) { search.value = ""; update(); event.target.blur(); }
    if (typing || event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  });
  find("help").addEventListener("click", keys["?"]);
  update();
}
find("theme").addEventListener("click", theme);
document.addEventListener("click", (event) => { if (event.target.matches("button.copy")) copy(event.target); });
