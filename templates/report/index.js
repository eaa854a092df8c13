"use strict";
// Sorts and filters tables of class "sortable". Its state is the fragment: #runs.sort=improvement&runs.dir=desc&runs.q=sft
// #find=words searches runs, agents, failures and notes, also in what is folded and in text that no column shows.
// Of a long table the first rows are shown, since laying out thousands takes a browser seconds; runs.all=yes shows the rest.
(() => {
  const FIRST_ROWS = 250;
  const number = /^[<≤]?\s*[+−-]?[\d.]+/;
  const key = (cell) => {
    if (!cell) return null;
    const text = cell.dataset.v ?? cell.textContent.trim();
    if (text === "" || text === "–") return null;
    const found = number.exec(text);
    return found ? parseFloat(found[0].replace(/[<≤+\s]/g, "").replace("−", "-")) : text.toLowerCase();
  };
  const compare = (a, b) => {
    if (a === null || b === null) return a === b ? 0 : a === null ? 2 : -2;
    if (typeof a === typeof b) return a < b ? -1 : a > b ? 1 : 0;
    return typeof a === "number" ? -1 : 1;
  };
  const state = () => new URLSearchParams(location.hash.includes("=") ? location.hash.slice(1) : "");
  const words = (text) => text.toLowerCase().split(/\s+/).filter(Boolean);
  const set = (values) => {
    const all = state();
    for (const [name, value] of Object.entries(values)) if (value) all.set(name, value); else all.delete(name);
    history.replaceState(null, "", `#${all}`);
    show();
  };
  const keep = (table, values) => set(Object.fromEntries(Object.entries(values).map(([name, value]) => [`${table.id}.${name}`, value])));
  const tables = [...document.querySelectorAll("table.sortable")].map((table) => {
    const body = table.tBodies[0];
    const rows = [...body.rows];
    const heads = [...table.tHead.rows[0].cells];
    const it = {table, body, rows, heads, texts: null, sorted: null, order: rows, now: ""};
    const tool = document.createElement("p");
    tool.className = "tool";
    it.count = document.createElement("output");
    if (rows.length > 7) {
      const label = document.createElement("label");
      it.input = document.createElement("input");
      it.input.type = "search";
      it.input.placeholder = "words, all of which a row must have";
      it.input.addEventListener("input", () => keep(table, {q: it.input.value}));
      label.append("filter ", it.input);
      tool.append(label, " ");
    }
    const pick = document.createElement("select");
    pick.setAttribute("aria-label", "sort by");
    pick.append(new Option("sort by …", ""));
    const taken = new Set();
    heads.forEach((head, column) => {
      let name = head.dataset.sort ?? head.textContent.trim();
      if (taken.has(name)) name = `${name} (column ${column + 1})`;
      taken.add(name);
      head.dataset.sort = name;
      if (!name) return;
      pick.append(new Option(name, name));
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const now = head.getAttribute("aria-sort");
        const first = head.classList.contains("n") ? "desc" : "asc";
        const dir = !now ? first : now === "ascending" ? "desc" : "asc";
        keep(table, {sort: name, dir});
      });
    });
    pick.addEventListener("change", () => keep(table, {sort: pick.value, dir: heads.some((h) => h.dataset.sort === pick.value && h.classList.contains("n")) ? "desc" : ""}));
    it.pick = pick;
    it.more = document.createElement("button");
    it.more.type = "button";
    it.more.addEventListener("click", () => keep(table, {all: "yes"}));
    tool.append(pick, " ", it.count, " ", it.more);
    (table.closest(".wide") ?? table).before(tool);
    return it;
  });
  const sort = (it, name, dir) => {
    const wanted = `${name} ${dir}`;
    if (it.sorted === wanted) return;
    it.sorted = wanted;
    const column = it.heads.findIndex((head) => head.dataset.sort === name);
    it.heads.forEach((head, at) => {
      if (at === column) head.setAttribute("aria-sort", dir === "desc" ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
    it.order = it.rows;
    if (column >= 0) {
      const sign = dir === "desc" ? -1 : 1;
      const keyed = it.rows.map((row, at) => ({row, at, key: key(row.cells[column])}));
      keyed.sort((a, b) => {
        const found = compare(a.key, b.key);
        return (Math.abs(found) === 2 ? found : sign * found) || a.at - b.at;
      });
      it.order = keyed.map((one) => one.row);
    }
    it.pick.value = column >= 0 ? name : "";
  };
  const filtered = (it, text) => {
    if (it.input && it.input.value !== text) it.input.value = text;
    const wanted = words(text);
    if (wanted.length && !it.texts) {
      it.texts = new Map(it.rows.map((row) => [row, [...row.cells].map((cell) => cell.textContent).join(" ").toLowerCase()]));
    }
    return wanted.length ? it.order.filter((row) => wanted.every((word) => it.texts.get(row).includes(word))) : it.order;
  };
  const render = (it, sorted, dir, text, all) => {
    const now = JSON.stringify([sorted, dir, text, all]);
    if (it.now === now) return;
    it.now = now;
    sort(it, sorted, dir);
    const fits = filtered(it, text);
    const shown = all ? fits : fits.slice(0, FIRST_ROWS);
    it.more.hidden = shown.length === fits.length;
    it.more.textContent = `show all ${fits.length}`;
    const some = shown.length < fits.length ? `${shown.length} shown of ` : "";
    it.count.textContent = some || text ? `${some}${fits.length} of ${it.rows.length} rows` : "";
    if (shown.length !== it.body.rows.length || shown.some((row, at) => row !== it.body.rows[at])) it.body.replaceChildren(...shown);
  };
  // full-text search: each row of a table of a kind, and each note
  const box = document.getElementById("search"), field = document.getElementById("find"), MOST = 50;
  let texts = null, sought = "";
  const gather = () => {
    const of = (it, kind, head) => {
      const text = [...(it.cells ?? [it]), {textContent: it.dataset.text ?? ""}].map((part) => part.textContent).join(" ").replace(/\s+/g, " ").trim();
      return {it, kind, head, text, low: text.toLowerCase()};
    };
    const found = tables.filter((it) => it.table.dataset.kind).flatMap((it) => it.rows.map((row) => of(row, it.table.dataset.kind, row.querySelector(".head")?.textContent.replace(/\s+/g, " ").trim())));
    const all = [...found, ...[...document.querySelectorAll("#notes li")].map((note) => of(note, "note", ""))];
    all.forEach(({it}, number) => { it.id ||= `t${number}`; });
    return all;
  };
  const hit = ({it, kind, head, text, low}, wanted) => {
    const line = document.createElement("li"), link = document.createElement("a");
    const page = it.querySelector("td.head a");
    link.href = page ? page.href : `#${it.id}`;
    link.textContent = head || kind;
    const at = low.indexOf(wanted[0]), begin = Math.max(0, at - 60);
    const mark = document.createElement("mark");
    mark.textContent = text.slice(at, at + wanted[0].length);
    const snippet = document.createElement("small");
    snippet.append(`${kind}: ${begin ? "…" : ""}${text.slice(begin, at)}`, mark, text.slice(at + wanted[0].length, at + 100));
    line.append(link, " ", snippet);
    return line;
  };
  const search = (text) => {
    if (!box || sought === text) return;
    sought = text;
    if (field.value !== text) field.value = text;
    const wanted = words(text);
    texts ??= wanted.length ? gather() : null;
    const hits = wanted.length ? texts.filter((one) => wanted.every((word) => one.low.includes(word))) : [];
    document.getElementById("hits").textContent = wanted.length ? `${hits.length} found${hits.length > MOST ? `, the first ${MOST}` : ""}` : "";
    document.getElementById("found").replaceChildren(...hits.slice(0, MOST).map((one) => hit(one, wanted)));
  };
  if (box) {
    box.hidden = false;
    field.addEventListener("input", () => set({find: field.value}));
  }
  const reveal = () => {
    const target = location.hash.length > 1 && !location.hash.includes("=") && document.getElementById(location.hash.slice(1));
    if (!target) return;
    for (let one = target; one; one = one.parentElement) if (one.tagName === "DETAILS") one.open = true;
    target.scrollIntoView({block: target.tagName === "TR" || target.tagName === "LI" ? "center" : "start"});
  };
  const show = () => {
    const all = state();
    search(all.get("find") ?? "");
    for (const it of tables) {
      const at = (name) => all.get(`${it.table.id}.${name}`) ?? "";
      render(it, at("sort"), at("dir"), at("q"), at("all") === "yes");
    }
  };
  addEventListener("hashchange", () => { show(); reveal(); });
  show();
  reveal();
})();
