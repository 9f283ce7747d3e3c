// The shell: routes, the header that is on every page, theme, keys. The last script: it starts everything.
"use strict";
(() => {
  const D = window.duramen;
  const { html, bytes, count, Text, useState, useEffect, useRef } = D;

  const NAV = [
    ["topics", "#/", "Topics", "M4 5h16M4 12h16M4 19h10"],
    ["why", "#/why", "Why and when", "M12 7v5l3 2M21 12a9 9 0 1 1-18 0 9 9 0 0 1 18 0"],
    ["runs", "#/runs", "Runs", "M5 20V9M12 20V4M19 20v-7"],
    ["whatif", "#/what-if", "What if", "M4 7h10M18 7h2M14 5v4M4 17h4M12 17h8M8 15v4"],
    ["horizons", "#/horizons", "Horizons", "M4 6h16v14H4zM4 10h16M8 3v5M16 3v5"],
    ["commits", "#/commits", "Commits", "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8zM12 3v5M12 16v5"],
    ["messages", "#/messages", "Messages", "M4 5h16v11H9l-5 4z"],
    ["erasure", "#/erasure", "Erasure", "M5 7h14M9 7V4h6v3M7 7l1 13h8l1-13"],
    ["settings", "#/settings", "Settings", "M4 8h9M17 8h3M15 6v4M4 16h3M11 16h9M9 14v4"],
  ];
  const GO = { t: "/", w: "/why", r: "/runs", i: "/what-if", h: "/horizons", c: "/commits", m: "/messages", e: "/erasure", s: "/settings" };

  function parse(hash) {
    const [path, search] = hash.replace(/^#/, "").split("?");
    const params = Object.fromEntries(new URLSearchParams(search || ""));
    let parts;
    try {
      parts = path.split("/").filter(Boolean).map(decodeURIComponent);
    } catch {
      return { page: "missing", params };
    }
    const [head, first, second] = parts;
    if (!head) return { page: "topics", params };
    if (head === "topics" && parts.length === 2) return { page: "topic", topic: first, params };
    if (head === "topics" && parts.length === 3 && /^\d{1,10}$/.test(second)) return { page: "partition", topic: first, partition: Number(second), params };
    if (head === "runs" && parts.length === 2) return { page: "run", run_id: first, params };
    const flat = { why: "why", runs: "runs", "what-if": "whatif", horizons: "horizons", commits: "commits", messages: "messages", erasure: "erasure", settings: "settings" };
    return { page: parts.length === 1 && flat[head] ? flat[head] : "missing", params };
  }
  const go = (path) => { location.hash = `#${path}`; };

  const Missing = () => html`<h1 tabindex="-1">Not found</h1><${D.Empty} title="There is no such page"><a href="#/">Back to the topics</a><//>`;

  // --- theme: the system's, unless chosen here ---
  const THEME = "duramen.theme";
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const chosenTheme = () => { try { return localStorage.getItem(THEME); } catch { return null; } };
  function applyTheme() {
    const chosen = chosenTheme();
    document.documentElement.dataset.theme = chosen === "light" || chosen === "dark" ? chosen : dark.matches ? "dark" : "light";
    D.onTheme();
  }
  function toggleTheme() {
    const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    try { localStorage.setItem(THEME, next); } catch { /* It lasts for this page only. */ }
    document.documentElement.dataset.theme = next;
    D.onTheme();
  }
  dark.addEventListener("change", applyTheme);

  // --- header ---
  const Logo = () => html`<svg class="logo" viewBox="0 0 40 40" aria-hidden="true">
    <circle class="bark" cx="20" cy="20" r="18.5" /><circle class="sap" cx="20" cy="20" r="15.5" /><circle class="heart" cx="19.4" cy="20.4" r="10.5" />
    <g class="lines"><circle cx="19.8" cy="20.1" r="13" /><circle cx="19.2" cy="20.5" r="7.6" /><circle cx="19" cy="20.7" r="4.8" /><circle cx="18.8" cy="20.8" r="2" /></g></svg>`;

  function Health({ health }) {
    const label = { ok: "healthy", warning: "warning", error: "error" }[health.status];
    if (health.findings.length === 0) return html`<${D.Pill} kind=${`health-${health.status}`}>${label}<//>`;
    return html`<details class="pop"><summary><${D.Pill} kind=${`health-${health.status}`}>${D.plural(health.findings.length + health.left_off, "finding")}<//></summary>
      <div class="pop-body"><ul class="findings">${health.findings.map((f) => html`<li class=${`finding-${f.severity}`}><b><${Text} text=${f.what} max=${400} /></b>${f.where ? html` <span class="faint"><${Text} text=${f.where} max=${200} /></span>` : null}${f.hint ? html`<span class="block faint"><${Text} text=${D.unquoted(f.hint)} max=${400} /></span>` : null}</li>`)}
        ${health.left_off ? html`<li class="faint">and ${count(health.left_off)} more</li>` : null}</ul></div></details>`;
  }

  function Space({ space }) {
    if (space.free_bytes === null || !space.total_bytes) return html`<span class="space">${bytes(space.log_bytes)} · free space unknown</span>`;
    const used = 1 - space.free_bytes / space.total_bytes;
    return html`<div class="space" title=${`${bytes(space.free_bytes)} of ${bytes(space.total_bytes)} free`}><${D.Meter} value=${used} kind=${used > 0.9 ? "bad" : "accent"} label=${`disk filled to ${D.percent(used)}`} /><span><b class="num">${bytes(space.free_bytes)}</b> free</span></div>`;
  }

  function Jobs({ daemon }) {
    if (!daemon.told) return html`<span class="jobs faint" title="Nothing is locked, and processes do not tell each other what they are at">a bucket does not tell who maintains it</span>`;
    if (!daemon.running) return html`<span class="jobs faint">no scheduler running</span>`;
    return html`<ul class="jobs" aria-label=${`Jobs of the scheduler ${D.plain(daemon.where || "")}`}>${daemon.jobs.map((job) => html`<li class=${`job ${job.running ? "job-running" : ""} ${job.ok === false ? "job-bad" : ""}`} title=${D.plain(job.problems.join("; ")) || undefined}>
      <${Text} text=${job.name} /> <span class="num">${job.running ? "running" : job.interval_ms === null ? "off" : html`<${Next} ms=${job.next_ms} />`}</span></li>`)}</ul>`;
  }
  function Next({ ms }) {
    const now = D.useNow();
    return ms === null ? "–" : ms <= now ? "now" : `in ${D.duration(1000 * Math.ceil((ms - now) / 1000))}`;
  }

  function Running({ passes }) {
    if (!passes.length) return null;
    return html`<ul class="passes" aria-label="Passes under way">${passes.slice(0, 4).map((pass) => {
      const share = pass.total_bytes ? Math.min(1, (pass.done_bytes || 0) / pass.total_bytes) : 0;
      return html`<li><a href=${`#/topics/${encodeURIComponent(pass.topic)}/${pass.partition}`}><${Text} text=${`${pass.topic}-${pass.partition}`} max=${48} /></a>
        <span class="pass-step">${pass.step || "working"}</span><${D.Meter} value=${share} label=${`${pass.step || "working"}: ${D.percent(share)}`} />
        <span class="num faint">${pass.done_bytes === null ? "" : `${bytes(pass.done_bytes)}${pass.total_bytes === null ? "" : ` of ${bytes(pass.total_bytes)}`}`}${pass.bytes_per_second ? ` · ${bytes(pass.bytes_per_second)}/s` : ""}${pass.left_ms ? ` · ${D.duration(pass.left_ms)} left` : ""}</span></li>`;
    })}${passes.length > 4 ? html`<li class="faint">and ${count(passes.length - 4)} more</li>` : null}</ul>`;
  }

  function Header() {
    const { store, error } = D.useStore();
    return html`<header class="top">
      ${store ? html`<div class="top-row">
        <div class="store-name"><${Text} class="store-path" text=${store.store.path} title=${D.plain(store.store.path)} />${store.store.kind === "bucket" ? html`<span class="chip">bucket</span>` : null}${store.store.read_only ? html`<span class="chip">read-only</span>` : null}${store.store.origin ? html`<span class="chip" title=${D.plain(store.store.origin.source)}>copy</span>` : null}</div>
        <${Health} health=${store.health} /><${Space} space=${store.space} /><${Jobs} daemon=${store.daemon} /></div>
        <${Running} passes=${store.running} />` : error ? null : html`<div class="top-row"><span class="faint">Opening the store…</span></div>`}
      ${D.report ? html`<div class="banner">Report of <${D.Time} ms=${D.report.made_ms} />: a moment, not a live store.</div>` : null}
      ${error && error.status !== 401 ? html`<div class="banner banner-error" role="alert"><${Text} text=${error.what || error.message} /> ${store ? "What you see is the last that was heard. " : ""}It is tried again every few seconds.</div>` : null}
    </header>`;
  }

  function Help({ onClose }) {
    const box = useRef(null);
    useEffect(() => { box.current.showModal(); }, []);
    const rows = [["/", "search"], ["↑ ↓", "from row to row; Enter opens"], ["← →", "from segment to segment, on the strip"], ["+ −", "zoom the strip; Esc shows all of it"], ["g t", "topics"], ["g w", "why and when"], ["g r", "runs"], ["g i", "what if"], ["g h", "horizons"], ["g c", "commits"], ["g m", "messages"], ["g e", "erasure"], ["g s", "settings"], ["d", "dark or light"], ["?", "this help"]];
    return html`<dialog ref=${box} class="dialog" aria-labelledby="help-title" onClose=${onClose}><div class="dialog-head"><h2 id="help-title">Keys</h2><button type="button" class="ghost" aria-label="Close" onClick=${() => box.current.close()}>×</button></div>
      <dl class="keys">${rows.map(([key, what]) => html`<div><dt>${key.split(" ").map((k) => html`<kbd>${k}</kbd>`)}</dt><dd>${what}</dd></div>`)}</dl></dialog>`;
  }

  function useKeys(setHelp) {
    useEffect(() => {
      let chord = 0;
      const listener = (event) => {
        const typing = event.target.closest("input, select, textarea, [contenteditable]");
        if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
        if (typing) { if (event.key === "Escape") event.target.blur(); return; }
        if (event.key === "/") {
          const field = document.querySelector("[data-search]");
          if (field) { event.preventDefault(); field.focus(); field.select(); }
        } else if (event.key === "?") setHelp(true);
        else if (event.key === "d") toggleTheme();
        else if (event.key === "g") { chord = performance.now(); return; }
        else if (performance.now() - chord < 1200 && GO[event.key]) go(GO[event.key]);
        else if ((event.key === "ArrowDown" || event.key === "ArrowUp") && document.activeElement === document.body) {
          const first = document.querySelector("main tbody a, main tbody button");
          if (first) { event.preventDefault(); first.focus(); }
        }
        chord = 0;
      };
      document.addEventListener("keydown", listener);
      return () => document.removeEventListener("keydown", listener);
    }, []);
  }

  const pageOf = { topic: "topics", partition: "topics", run: "runs" };

  function App() {
    const [hash, setHash] = useState(location.hash);
    const [help, setHelp] = useState(false);
    const { store, error } = D.useStore();
    const locked = error !== null && error.status === 401;
    const first = useRef(true);
    useKeys(setHelp);
    useEffect(() => {
      const listener = () => setHash(location.hash);
      window.addEventListener("hashchange", listener);
      return () => window.removeEventListener("hashchange", listener);
    }, []);
    const route = parse(hash);
    const Page = D.pages[route.page] || Missing;
    const current = pageOf[route.page] || route.page;
    useEffect(() => {
      for (const chosen of document.querySelectorAll(".nav [aria-current], .subnav [aria-current]")) chosen.scrollIntoView({ block: "nearest", inline: "nearest" });
      const title = document.querySelector("main h1");
      document.title = `${title ? title.textContent : "Duramen"} · Duramen`;
      if (!first.current) { window.scrollTo(0, 0); if (title) title.focus({ preventScroll: true }); }
      first.current = false;
    }, [hash]);
    return html`
      <a class="skip" href="#main" onClick=${(event) => { event.preventDefault(); document.getElementById("main").focus(); }}>Skip to the content</a>
      <div class="side">
        <a class="brand" href="#/" aria-label="Duramen, first page"><${Logo} /><span>Duramen</span></a>
        <nav class="nav" aria-label="Pages"><ul>${NAV.map(([key, href, label, path]) => html`<li><a href=${href} aria-current=${current === key ? "page" : undefined}><svg viewBox="0 0 24 24" aria-hidden="true"><path d=${path} /></svg>${label}</a></li>`)}</ul></nav>
        <div class="side-foot"><button type="button" class="ghost" onClick=${toggleTheme} aria-label="Dark or light" title="Dark or light (d)"><svg viewBox="0 0 24 24" aria-hidden="true"><path d="M12 3a9 9 0 1 0 0 18V3z" class="solid" /><circle cx="12" cy="12" r="9" /></svg></button>
          <button type="button" class="ghost" onClick=${() => setHelp(true)} aria-label="Keys" title="Keys (?)">?</button>
          ${store ? html`<span class="version faint num">${D.plain(store.version)}</span>` : null}</div>
      </div>
      <div class="body"><${Header} />
        <main id="main" tabindex="-1" data-place=${hash}>${locked ? html`<${D.Locked} />` : html`<${Page} key=${hash.split("?")[0] + (route.page === "topics" ? "" : `?${route.params.topic || ""}`)} route=${route} go=${go} />`}</main></div>
      <${D.ActionDialog} />
      ${help ? html`<${Help} onClose=${() => setHelp(false)} />` : null}`;
  }

  // `duramen console` prints an address with the token behind the #; it does not stay in the address bar.
  const given = /^#token=(.+)$/.exec(location.hash);
  if (given) {
    D.token.set(decodeURIComponent(given[1]));
    history.replaceState(null, "", "#/");
  }
  applyTheme();
  D.render(html`<${App} />`, document.getElementById("app"));
  D.poll();
})();
