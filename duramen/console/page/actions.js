// The only things that change the store: with the token, and never before their dry run was looked at.
"use strict";
(() => {
  const D = window.duramen;
  const { html, bytes, count, Text, useState, useEffect, useRef } = D;

  const NAMES = { compact: "Compact now", pause: "Pause", resume: "Resume", retain: "Retain" };
  const opened = { action: null, listeners: new Set() };
  const open = (action) => { opened.action = action; opened.listeners.forEach((each) => each()); };

  function ActionButton({ action, topic, partition, label, primary }) {
    const { store } = D.useStore();
    if (D.report || !store || !store.actions.enabled) return null;
    return html`<button type="button" class=${primary ? "primary" : ""} data-action=${action} onClick=${() => open({ action, topic: topic || null, partition: partition === undefined ? null : partition })}>${label}</button>`;
  }

  function bodyOf(action, options) {
    const body = {};
    if (action.topic !== null) body.topic = action.topic;
    if (action.partition !== null) body.partitions = [action.partition];
    if (action.action === "compact") {
      if (options.force) body.force = true;
      if (options.roll_active) body.roll_active = true;
    }
    return body;
  }

  function TokenForm({ onToken, error }) {
    const [value, setValue] = useState("");
    const [failure, setFailure] = useState(error);
    const [busy, setBusy] = useState(false);
    const submit = async (event) => {
      event.preventDefault();
      setBusy(true);
      try {
        await D.request("GET", "/token", { token: value.trim() });
        D.token.set(value.trim());
        onToken(value.trim());
      } catch (caught) {
        setFailure(caught.status === 401 ? { what: "That is not the token." } : caught);
      }
      setBusy(false);
    };
    return html`<form onSubmit=${submit} class="token-form"><p>Actions need the token that <code>duramen console</code> printed when it started. It is kept until this tab is closed.</p>
      <label class="field field-grow"><span>Token</span><input type="password" autocomplete="off" required value=${value} onInput=${(event) => setValue(event.target.value)} /></label>
      ${failure ? html`<${D.Failure} error=${failure} />` : null}
      <div class="dialog-foot"><button type="submit" class="primary" disabled=${busy}>Go on</button></div></form>`;
  }

  /** A console off loopback asks for the token before it shows anything. */
  const Locked = () => html`<h1 tabindex="-1">Token</h1><${D.Card} title="This console asks for its token"><${TokenForm} onToken=${() => location.reload()} /><//>`;

  function Plan({ plan }) {
    return html`<p class="plan-summary"><${Text} text=${plan.summary} /></p>
      ${plan.effects.length ? html`<div class="plan" role="region" aria-label="What it would do" tabindex="0"><table><caption class="sr">What it would do</caption><thead><tr><th scope="col">Where</th><th scope="col">What</th><th scope="col" class="num">Bytes</th><th scope="col" class="num">Extra disk</th></tr></thead>
        <tbody>${plan.effects.map((e) => html`<tr><th scope="row"><${Text} text=${e.partition === null ? e.topic : `${e.topic}-${e.partition}`} /></th><td class="wrap"><${Text} text=${e.what} /></td><td class="num">${bytes(e.bytes)}</td><td class="num">${bytes(e.extra_bytes)}</td></tr>`)}</tbody></table></div>` : null}
      ${plan.left_off ? html`<p class="faint">and ${count(plan.left_off)} more.</p>` : null}`;
  }

  function Following({ id }) {
    const [action, setAction] = useState(null);
    useEffect(() => {
      let timer = null;
      let over = false;
      const look = async () => {
        let ended = false;
        try {
          const found = (await D.get("/actions")).actions.find((each) => each.action_id === id);
          if (found && !over) setAction(found);
          ended = found && found.state !== "running";
        } catch {
          // The header says that the console does not answer.
        }
        if (ended) D.poll();
        else if (!over) timer = setTimeout(look, 700);
      };
      look();
      return () => { over = true; clearTimeout(timer); };
    }, [id]);
    if (!action) return html`<${D.Loading} />`;
    return html`<div role="status" data-state=${action.state}><p class="plan-summary"><${D.Pill} kind=${action.state === "failed" ? "failed" : action.state}>${action.state}<//> <${Text} text=${action.summary} /></p>
      ${action.total ? html`<${D.Meter} value=${action.done / action.total} label=${`${action.done} of ${action.total} partitions`} /><p class="faint num">${count(action.done)} of ${D.plural(action.total, "partition")}</p>` : null}
      ${action.problems.map((problem) => html`<${D.Note} kind="error"><${Text} text=${problem} /><//>`)}</div>`;
  }

  function Steps({ action, onClose }) {
    const [token, setToken] = useState(D.token.get());
    const [options, setOptions] = useState({ force: false, roll_active: false });
    const [shown, setPlan] = useState(null);
    const plan = shown && shown.options === options ? shown : null; // that of other options may not be confirmed
    const [error, setError] = useState(null);
    const [started, setStarted] = useState(null);
    const path = `/actions/${action.action}`;
    const fail = (caught) => {
      if (caught.status === 401) { D.token.set(""); setToken(""); }
      setError(caught);
    };
    useEffect(() => {
      if (!token || started) return undefined;
      let over = false;
      setPlan(null);
      setError(null);
      D.post(path, { dry_run: true }, bodyOf(action, options), token).then((answer) => over || setPlan({ ...answer, options }), (caught) => over || fail(caught));
      return () => { over = true; };
    }, [token, options]);
    const go = async () => {
      try {
        setStarted(await D.post(path, { dry_run: false }, { ...bodyOf(action, options), digest: plan.digest }, token));
        D.poll();
      } catch (caught) {
        // The store changed meanwhile: look at the dry run again.
        fail(caught);
        setPlan(null);
        if (caught.status === 409) setOptions({ ...options });
      }
    };
    if (!token) return html`<${TokenForm} error=${error} onToken=${(value) => { setError(null); setToken(value); }} />`;
    if (started) return html`<${Following} id=${started.action_id} /><div class="dialog-foot"><button type="button" onClick=${onClose}>Close</button></div>`;
    return html`
      ${action.action === "compact" ? html`<div class="options"><label class="check"><input type="checkbox" checked=${options.force} onChange=${(event) => setOptions({ ...options, force: event.target.checked })} /> whatever the dirty ratio</label>
        <label class="check"><input type="checkbox" checked=${options.roll_active} onChange=${(event) => setOptions({ ...options, roll_active: event.target.checked })} /> close active segments first</label></div>` : null}
      <h3>Dry run</h3>
      ${error ? html`<${D.Failure} error=${error} />` : null}
      ${plan ? html`<${Plan} plan=${plan} />` : error ? null : html`<${D.Loading} />`}
      <div class="dialog-foot"><button type="button" onClick=${onClose}>Cancel</button>
        <button type="button" class="primary" data-confirm disabled=${!plan || !plan.changes} onClick=${go}>${plan && !plan.changes ? "Nothing to do" : NAMES[action.action]}</button></div>`;
  }

  function ActionDialog() {
    const [action, setAction] = useState(null);
    const box = useRef(null);
    useEffect(() => {
      const listener = () => setAction(opened.action);
      opened.listeners.add(listener);
      return () => opened.listeners.delete(listener);
    }, []);
    useEffect(() => {
      if (action && box.current && !box.current.open) box.current.showModal();
    }, [action]);
    const close = () => { if (box.current && box.current.open) box.current.close(); };
    if (!action) return null;
    const where = action.topic === null ? "all topics" : action.partition === null ? action.topic : `${action.topic}-${action.partition}`;
    return html`<dialog ref=${box} class="dialog" aria-labelledby="action-title" onClose=${() => { open(null); }}>
      <div class="dialog-head"><h2 id="action-title">${NAMES[action.action]} · <${Text} text=${where} /></h2><button type="button" class="ghost" aria-label="Close" onClick=${close}>×</button></div>
      <${Steps} key=${`${action.action} ${where}`} action=${action} onClose=${close} /></dialog>`;
  }

  Object.assign(D, { ActionButton, ActionDialog, Locked });
})();
