// Answers from inside a report: the lists are complete there, so searching, sorting and paging happen here.
"use strict";
(() => {
  const D = window.duramen;

  const SORTS = { size: "size_bytes", last_record: "last_record_ms" };

  function sorted(rows, name, order) {
    const field = SORTS[name] || name;
    const sign = order === "desc" ? -1 : 1;
    return [...rows].sort((a, b) => {
      const [x, y] = [a[field], b[field]];
      if (x === y) return a.name < b.name ? -1 : 1;
      if (x === null) return 1;
      if (y === null) return -1;
      return x < y ? -sign : sign;
    });
  }

  const page = (rows, { offset = 0, limit = 50 }) => rows.slice(Number(offset), Number(offset) + Number(limit));

  function topics(answer, params) {
    let rows = answer.topics;
    if (params.search) rows = rows.filter((t) => t.name.toLowerCase().includes(String(params.search).toLowerCase()));
    if (params.state) rows = rows.filter((t) => t.states[params.state] > 0);
    rows = sorted(rows, params.sort || "name", params.order);
    return { ...answer, total: rows.length, offset: Number(params.offset || 0), topics: page(rows, params) };
  }

  function explain(answer, params) {
    const rows = answer.partitions.filter(
      (p) => (!params.topic || p.topic === params.topic) && (!params.state || p.state === params.state),
    );
    return { ...answer, total: rows.length, partitions: page(rows, params) };
  }

  function summed(rows) {
    const summary = { results: {}, removed: {}, before_bytes: 0, after_bytes: 0 };
    for (const run of rows) {
      summary.results[run.result] = (summary.results[run.result] || 0) + 1;
      for (const [reason, n] of Object.entries(run.removed)) summary.removed[reason] = (summary.removed[reason] || 0) + n;
      if (run.result !== "done") continue;
      summary.before_bytes += run.before_bytes || 0;
      summary.after_bytes += run.after_bytes || 0;
    }
    return summary;
  }

  function runs(answer, params) {
    const rows = answer.runs.filter(
      (run) =>
        (!params.topic || run.topic === params.topic) &&
        (params.partition === undefined || params.partition === "" || run.partition === Number(params.partition)) &&
        (!params.result || run.result === params.result),
    );
    const at = Number(params.position || 0);
    const end = at + Number(params.limit || 50);
    const filtered = rows.length !== answer.runs.length;
    return {
      ...answer,
      total: filtered ? rows.length : answer.total,
      runs: rows.slice(at, end),
      next: end < rows.length ? String(end) : null,
      summary: filtered ? summed(rows) : answer.summary,
    };
  }

  function commits(answer, params) {
    const rows = answer.commits.filter(
      (c) => (!params.app || c.app_id === params.app) && (!params.topic || c.topic === params.topic),
    );
    const at = Number(params.position || 0);
    const end = at + Number(params.limit || 50);
    return { ...answer, commits: rows.slice(at, end), next: end < rows.length ? String(end) : null };
  }

  function horizons(answer, params) {
    if (!params.topic) return answer;
    const events = answer.events.filter((event) => event.topic === params.topic);
    const days = new Map();
    for (const event of events) {
      const day = new Date(event.time_ms + answer.utc_offset_minutes * 60000).toISOString().slice(0, 10);
      if (!days.has(day)) days.set(day, {});
      days.get(day)[event.kind] = (days.get(day)[event.kind] || 0) + 1;
    }
    return { ...answer, total: events.length, events, days: [...days].map(([day, counts]) => ({ day, counts })) };
  }

  function oneRun(answers, prefix, path) {
    const id = decodeURIComponent(path.slice("/runs/".length));
    for (const [key, answer] of Object.entries(answers)) {
      if (!key.startsWith(prefix) || !Array.isArray(answer.runs)) continue;
      const run = answer.runs.find((each) => each.run_id === id);
      if (run) return run;
    }
    return null;
  }

  const LISTS = { "/topics": topics, "/explain": explain, "/runs": runs, "/commits": commits, "/horizons": horizons };

  D.fromReport = (report, prefix, path, params) => {
    const answers = report.answers;
    const exact = answers[prefix + path + D.query({ partition: params.partition })];
    const answer = exact || answers[prefix + path];
    if (answer && LISTS[path]) return LISTS[path](answer, params);
    if (answer && /^\/topics\/[^/]+$/.test(path)) {
      return { ...answer, total: answer.partitions.length, partitions: page(answer.partitions, params) };
    }
    if (answer && path.endsWith("/history") && params.range && params.range !== answer.range) {
      throw new D.ApiError(404, `Only the range ${answer.range} is part of this report.`);
    }
    if (answer) return answer;
    if (path.startsWith("/runs/")) {
      const run = oneRun(answers, prefix, path);
      if (run) return run;
    }
    throw new D.ApiError(404, "This is not part of this report.", "Open it in `duramen console`.");
  };
})();
