// The runs over time: each stands at its moment, as tall as the log before it, filled as far as the log after it.
"use strict";
(() => {
  const D = window.duramen;
  const { html, Component, createRef, bytes, plain } = D;
  const HEIGHT = 150;
  const FOOT = 20;

  class Timeline extends Component {
    constructor() {
      super();
      this.canvas = createRef();
      this.state = { at: null };
    }
    componentDidMount() {
      this.resize = new ResizeObserver(() => this.draw());
      this.resize.observe(this.canvas.current);
      this.retheme = () => this.draw();
      D.themed.add(this.retheme);
    }
    componentDidUpdate() {
      this.draw();
    }
    componentWillUnmount() {
      this.resize.disconnect();
      D.themed.delete(this.retheme);
    }
    range() {
      const runs = this.props.runs.filter((run) => run.started_ms !== null).sort((a, b) => a.started_ms - b.started_ms);
      const first = Math.min(...runs.map((run) => run.started_ms));
      const last = Math.max(...runs.map((run) => run.ended_ms || run.started_ms), first + 1000);
      const apart = Math.max(0, 10000 - (last - first)) / 2; // at least ten seconds, so that the moments below differ
      return [runs, first - apart, last + apart, Math.max(1, ...runs.map((run) => Math.max(run.before_bytes || 0, run.after_bytes || 0)))];
    }
    draw() {
      const canvas = this.canvas.current;
      const width = canvas && canvas.clientWidth;
      if (!width) return;
      const scale = window.devicePixelRatio || 1;
      canvas.width = width * scale;
      canvas.height = HEIGHT * scale;
      const paint = canvas.getContext("2d");
      paint.scale(scale, scale);
      const [runs, first, last, most] = this.range();
      const color = Object.fromEntries(["clean", "dirty", "bad", "muted", "grid", "ink", "info"].map((name) => [name, D.color(name)]));
      const x = (ms) => 8 + ((ms - first) / (last - first)) * (width - 20);
      const floor = HEIGHT - FOOT;
      paint.fillStyle = color.grid;
      for (const share of [0, 0.5, 1]) paint.fillRect(0, floor - share * (floor - 10), width, 1);
      paint.font = "11px system-ui, sans-serif";
      const places = this.places(runs, x, last, width);
      this.bars = runs.map((run, i) => {
        const [left, wide] = places[i];
        const before = Math.max(3, ((run.before_bytes || 0) / most) * (floor - 10));
        const after = ((run.after_bytes ?? 0) / most) * (floor - 10);
        paint.fillStyle = run.result === "done" ? color.dirty : run.result === "running" ? color.info : run.result === "failed" ? color.bad : color.muted;
        paint.globalAlpha = run.result === "done" ? 0.55 : 0.85;
        paint.fillRect(left, floor - before, wide, before);
        paint.globalAlpha = 1;
        if (run.result === "done") {
          paint.fillStyle = color.clean;
          paint.fillRect(left, floor - after, wide, after);
        }
        return [left, left + wide, run];
      });
      const chosen = this.bars.find(([, , run]) => run.run_id === this.state.at);
      if (chosen) {
        paint.strokeStyle = color.ink;
        paint.lineWidth = 1.5;
        paint.strokeRect(chosen[0] - 2, 4, chosen[1] - chosen[0] + 4, floor - 4);
      }
      paint.fillStyle = color.muted;
      const ticks = Math.max(2, Math.floor(width / 190));
      for (let i = 0; i < ticks; i += 1) {
        const ms = first + ((last - first) * i) / (ticks - 1);
        const said = last - first > 2 * 86400000 ? D.time(ms).slice(5, 16) : D.time(ms).slice(11, 19);
        paint.textAlign = i === 0 ? "left" : i === ticks - 1 ? "right" : "center";
        paint.fillText(said, Math.max(4, Math.min(width - 4, x(ms))), HEIGHT - 5);
      }
      paint.textAlign = "left";
      paint.fillText(bytes(most), 4, 9);
    }
    /** Runs of one moment stand side by side, as close to their time as there is room. */
    places(runs, x, last, width) {
      const slot = Math.min(5, (width - 20) / runs.length);
      const found = [];
      let end = 0;
      for (const run of runs) {
        const left = Math.max(x(run.started_ms), end);
        const wide = Math.max(slot, Math.min(40, x(run.ended_ms || last) - x(run.started_ms)));
        found.push([left, wide]);
        end = left + wide;
      }
      let edge = width - 4;
      for (let i = found.length - 1; i >= 0; i -= 1) {
        const [left, wide] = found[i];
        found[i] = [Math.max(0, Math.min(left, edge - wide)), wide > 2 ? wide - 1 : wide];
        edge = found[i][0];
      }
      return found;
    }
    near(event) {
      const box = this.canvas.current.getBoundingClientRect();
      const at = event.clientX - box.left;
      let best = null;
      for (const [left, right, run] of this.bars || []) {
        const gap = at < left ? left - at : at > right ? at - right : 0;
        if (gap < 14 && (best === null || gap <= best[0])) best = [gap, run];
      }
      return best && best[1];
    }
    render({ runs }, { at }) {
      if (!runs.length) return null;
      const run = runs.find((each) => each.run_id === at);
      const [, first, last] = this.range();
      return html`<div class="timeline">
        <canvas ref=${this.canvas} role="img" aria-label=${`${runs.length} runs between ${D.time(first)} and ${D.time(last)}; the table below lists them`}
          onPointerMove=${(event) => { const found = this.near(event); this.setState({ at: found ? found.run_id : null }); }}
          onPointerLeave=${() => this.setState({ at: null })}
          onClick=${(event) => { const found = this.near(event); if (found) location.hash = `#/runs/${encodeURIComponent(found.run_id)}`; }}></canvas>
        <div class="timeline-said">${run
          ? html`<b><${D.Text} text=${plain(`${run.topic}-${run.partition}`)} /></b> ${run.result}, ${D.time(run.started_ms)}: ${bytes(run.before_bytes)} → ${bytes(run.after_bytes)} in ${D.duration(run.seconds === null ? null : run.seconds * 1000)}`
          : html`<${D.Legend} items=${[["dirty", "before"], ["clean", "after"], ["bad", "failed"], ["info", "running"]]} />`}</div>
      </div>`;
    }
  }

  Object.assign(D, { Timeline });
})();
