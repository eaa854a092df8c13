"use strict";
// Shows a trace page by page. Its data are scripts beside the page, trace/NAME.js, which call trace(NAME, value), or
// elements of this page with the same content. Every text is put in as text, never as HTML. #e12 is the 13th entry.
(() => {
  const $ = (id) => document.getElementById(id);
  const element = (tag, cls, text) => {
    const it = document.createElement(tag);
    if (cls) it.className = cls;
    if (text !== undefined) it.textContent = text;
    return it;
  };
  const waiting = new Map();
  window.trace = (name, value) => { waiting.get(name)?.(value); waiting.delete(name); };
  const load = (name) => {
    const held = $(`data-${name}`);
    if (held) return Promise.resolve(JSON.parse(held.textContent));
    return new Promise((done, fail) => {
      waiting.set(name, done);
      const script = element("script");
      script.src = `trace/${name}.js`;
      script.onerror = () => fail(new Error(`trace/${name}.js is missing: it belongs beside this page`));
      script.onload = () => script.remove();
      document.head.append(script);
    });
  };
  const long = (text, lines = 30) => text.length > 100 * lines || text.split("\n", lines + 1).length > lines;
  const first = (text) => { const line = text.trimStart().split("\n", 1)[0]; return line.length > 160 ? line.slice(0, 160) + "…" : line; };
  const folded = (cls, summary, ...inner) => {
    const it = element("details", cls);
    it.append(summary, ...inner);
    return it;
  };
  const code = (text, label) => {
    const pre = element("pre", "", text);
    pre.tabIndex = 0;
    pre.setAttribute("aria-label", label);
    return pre;
  };
  const NAMES = {thought: "thought", user: "to the agent", system: "system prompt", error: "error", end: "end", output: "output"};
  const part = (it) => {
    const text = it.text ?? "", bad = it.kind === "error" || it.ok === false;
    if (it.kind === "tool") {
      const summary = element("summary", bad ? "bad" : "");
      summary.append(element("b", "", it.tool ?? "tool"), " ", element("code", "", first(text)));
      const exit = it.exit_code !== undefined ? `exit code ${it.exit_code}` : bad ? "failed" : it.ok === undefined ? "no answer" : "";
      const took = it.duration_s ? `${it.duration_s.toFixed(1)} s` : "";
      const said = [exit, took].filter(Boolean).join(", ");
      if (said) summary.append(" ", element("small", bad ? "warn" : "", said));
      return folded("part", summary, code(text, "input"), ...(it.output === undefined ? [] : [code(it.output, "output")]));
    }
    if (it.kind === "output") return long(text) ? folded("part", element("summary", "soft", `output: ${first(text)}`), code(text, "output")) : code(text, "output");
    const label = NAMES[it.kind];
    if (it.kind === "thought" || long(text, it.kind === "user" || it.kind === "system" ? 5 : 30)) {
      const summary = element("summary", `${it.kind}${bad ? " bad" : ""}`, `${label ? label + ": " : ""}${first(text)}`);
      return folded("part", summary, element("p", it.kind, text));
    }
    return element("p", `part ${it.kind}${bad ? " bad" : ""}`, [label, text].filter(Boolean).join(": "));
  };
  let index, page = -1;
  const drawn = (it, place) => {
    const box = element("section", "turn"), head = element("h2"), link = element("a", "", it.n ? `Turn ${it.n}` : "Output");
    if (!it.n && it.parts[0]?.kind !== "output") link.textContent = "Outside of turns";
    box.id = `e${place}`;
    link.href = `#e${place}`;
    const said = [it.at, it.attempt && `attempt ${it.attempt}`, it.used, it.by, it.where].filter(Boolean).join(" · ");
    head.append(link, element("small", "soft", said));
    box.append(head, ...it.parts.map(part), ...(index.submissions[place] ?? []).map((text) => element("div", "mark", text)));
    return box;
  };
  const pageOf = (place) => {
    let low = 0, high = index.pages.length;
    while (high - low > 1) { const middle = (low + high) >> 1; if (index.pages[middle] <= place) low = middle; else high = middle; }
    return low;
  };
  const pager = () => {
    const last = index.pages.length - 1;
    const shown = [...new Set([0, page - 10, page - 1, page, page + 1, page + 10, last])].filter((n) => n >= 0 && n <= last).sort((a, b) => a - b);
    for (const id of ["pager", "pager2"]) {
      $(id).replaceChildren(element("span", "", `${index.count} entries, page`), ...shown.map((n) => {
        const link = element("a", "", n + 1);
        link.href = `#e${index.pages[n]}`;
        if (n === page) link.setAttribute("aria-current", "page");
        return link;
      }));
      $(id).hidden = !last;
    }
  };
  const place = () => { const found = /^#e(\d{1,9})$/.exec(location.hash); return found ? Math.min(+found[1], index.count - 1) : 0; };
  const show = async () => {
    const at = place(), wanted = pageOf(at);
    if (wanted !== page || searching) {
      const turns = await load(`p${wanted}`);
      page = wanted;
      searching = "";
      $("turns").replaceChildren(...turns.map((it, n) => drawn(it, index.pages[wanted] + n)));
      pager();
    }
    document.querySelectorAll(".here").forEach((it) => it.classList.remove("here"));
    if (!location.hash) return;
    const box = $(`e${at}`);
    box.classList.add("here");
    box.querySelectorAll("details:has(> .bad)").forEach((it) => { it.open = true; });
    box.scrollIntoView();
  };
  const MOST = 200;
  let searching = "", round = 0;
  const search = async (words) => {
    const mine = ++round, wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
    if (!wanted.length) { $("found").textContent = ""; if (searching) await show(); return; }
    searching = words;
    $("turns").replaceChildren();
    let found = 0;
    for (let n = 0; n < index.pages.length && found < MOST; n++) {
      const turns = await load(`p${n}`);
      if (mine !== round) return;
      turns.forEach((it, at) => {
        const text = it.parts.map((each) => `${each.tool ?? ""} ${each.text ?? ""} ${each.output ?? ""}`).join("\n").toLowerCase();
        if (found >= MOST || !wanted.every((word) => text.includes(word))) return;
        const box = drawn(it, index.pages[n] + at);
        $("turns").append(box);
        found++;
      });
      $("found").textContent = `${found} entries in pages 1 to ${n + 1} of ${index.pages.length}`;
    }
    if (found >= MOST) $("found").textContent += `; the first ${MOST}`;
  };
  const trouble = (error) => $("turns").replaceChildren(element("p", "warn", error.message));
  load("index").then(async (value) => {
    index = value;
    await show();
    document.documentElement.dataset.shown = Math.round(performance.now());
    let timer;
    window.addEventListener("hashchange", () => show().catch(trouble));
    $("search").addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(() => search($("search").value).catch(trouble), 250); });
    $("failed").hidden = !index.failed.length;
    $("failed").addEventListener("click", () => {
      const at = location.hash ? place() : -1;
      location.hash = `#e${index.failed.find((n) => n > at) ?? index.failed[0]}`;
    });
    $("open").addEventListener("click", () => document.querySelectorAll("#turns details").forEach((it) => { it.open = true; }));
  }).catch(trouble);
})();
