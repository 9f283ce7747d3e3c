// The only door to the data: /api/v1, or the answers inside a report. Keeps the store's clock and its stamp.
"use strict";
(() => {
  const D = window.duramen;
  const { useState, useEffect, useRef } = D;
  const PREFIX = "/api/v1";
  const POLL_MS = 2000;
  const REFRESH_MS_MIN = 1500;

  const embedded = document.getElementById("duramen-report");
  const report = embedded ? JSON.parse(embedded.textContent) : null;

  class ApiError extends Error {
    constructor(status, what, hint, kind) {
      super(what);
      Object.assign(this, { status, what, hint: hint || null, kind: kind || null });
    }
  }

  const query = (params) => {
    const found = new URLSearchParams();
    for (const [name, value] of Object.entries(params || {})) {
      if (value !== null && value !== undefined && value !== "") found.set(name, String(value));
    }
    const text = found.toString();
    return text ? `?${text}` : "";
  };

  async function answerOf(response) {
    let body = null;
    try {
      body = await response.json();
    } catch {
      throw new ApiError(response.status, `The console answered ${response.status} without JSON.`);
    }
    if (response.ok) return body;
    const error = (body && body.error) || {};
    throw new ApiError(response.status, error.what || `The console answered ${response.status}.`, error.hint, error.kind);
  }

  async function request(method, path, { params, body, token, signal } = {}) {
    const headers = {};
    const secret = token === undefined ? D.token.get() : token;
    if (secret) headers.Authorization = `Bearer ${secret}`;
    if (body) headers["Content-Type"] = "application/json";
    const options = { method, headers, signal, cache: "no-store", credentials: "omit" };
    if (body) options.body = JSON.stringify(body);
    let response;
    try {
      response = await fetch(PREFIX + path + query(params), options);
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError(0, "The console does not answer.", "Is `duramen console` still running?");
    }
    return answerOf(response);
  }

  const get = (path, params, signal) =>
    report ? Promise.resolve().then(() => D.fromReport(report, PREFIX, path, params || {}))
      : request("GET", path, { params, signal });
  const post = (path, params, body, token) => request("POST", path, { params, body, token });

  // The store's clock, whatever this machine's says.
  const clock = {
    offset_ms: report ? 0 : null,
    now: () => (report ? report.made_ms : Date.now() + (clock.offset_ms || 0)),
  };

  // The header's answer, polled while the page is looked at. Its stamp tells the others when to ask again.
  const live = { store: null, error: null, listeners: new Set(), timer: null, loading: false };

  async function poll() {
    if (live.loading) return;
    live.loading = true;
    clearTimeout(live.timer);
    try {
      live.store = await get("/store");
      live.error = null;
      if (!report) clock.offset_ms = live.store.now_ms - Date.now();
    } catch (error) {
      live.error = error;
    }
    live.loading = false;
    for (const listener of [...live.listeners]) listener();
    if (!report && !document.hidden) live.timer = setTimeout(poll, live.error ? 2 * POLL_MS : POLL_MS);
  }
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) clearTimeout(live.timer);
    else if (!report) poll();
  });

  function useStore() {
    const [, redraw] = useState(0);
    useEffect(() => {
      const listener = () => redraw((n) => n + 1);
      live.listeners.add(listener);
      return () => live.listeners.delete(listener);
    }, []);
    return { store: live.store, error: live.error };
  }

  /** Asks for a path, and again when the store's stamp changes. What is there stays until the next answer is. */
  function useApi(path, params, { refresh = true } = {}) {
    const key = path === null ? null : path + query(params);
    const [state, setState] = useState({ key: null, data: null, error: null });
    const again = useRef(() => {});
    useEffect(() => {
      if (key === null) return undefined;
      const abort = new AbortController();
      let stamp = live.store && live.store.stamp;
      let busy = false;
      let timer = null;
      let next_ms = 0;
      const ask = async () => {
        if (busy) return;
        busy = true;
        const begun = performance.now();
        try {
          const data = await get(path, params, abort.signal);
          if (!abort.signal.aborted) setState({ key, data, error: null });
        } catch (error) {
          if (!abort.signal.aborted) setState((old) => ({ key, data: old.key === key ? old.data : null, error }));
        }
        busy = false;
        // A slow answer is asked for less often: at most a tenth of the time is spent on it.
        next_ms = performance.now() + Math.max(REFRESH_MS_MIN, 9 * (performance.now() - begun));
      };
      again.current = ask;
      const listener = () => {
        if (!live.store || live.store.stamp === stamp || timer !== null) return;
        timer = setTimeout(() => {
          timer = null;
          stamp = live.store.stamp;
          if (!document.hidden) ask();
        }, Math.max(0, next_ms - performance.now()));
      };
      ask();
      if (refresh && !report) live.listeners.add(listener);
      return () => {
        abort.abort();
        clearTimeout(timer);
        live.listeners.delete(listener);
      };
    }, [key, refresh]);
    return { data: state.data, error: state.error, stale: state.key !== key, again: () => again.current() };
  }

  /** The store's time, every second, for what counts down. */
  function useNow() {
    const [, tick] = useState(0);
    useEffect(() => {
      if (report) return undefined;
      const timer = setInterval(() => document.hidden || tick((n) => n + 1), 1000);
      return () => clearInterval(timer);
    }, []);
    return clock.now();
  }

  const SECRET = "duramen.token";
  const token = {
    get: () => {
      try {
        return sessionStorage.getItem(SECRET) || "";
      } catch {
        return "";
      }
    },
    set: (value) => {
      try {
        if (value) sessionStorage.setItem(SECRET, value);
        else sessionStorage.removeItem(SECRET);
      } catch {
        // Without storage it has to be typed each time.
      }
    },
  };

  /** Of a store in a bucket some things cannot be known, or are not kept. */
  const inBucket = () => Boolean(live.store && live.store.store.kind === "bucket");

  Object.assign(D, { inBucket, ApiError, report, query, request, get, post, clock, live, poll, useStore, useApi, useNow, token });
})();
