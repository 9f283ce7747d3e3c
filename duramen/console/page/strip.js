// A partition's segments to scale, on a canvas: overview, zoom, pointer and keys. When a compaction changes the log, the
// old strip turns into the new one, and what was freed stays visible as an empty place.
"use strict";
(() => {
  const D = window.duramen;
  const { html, Component, createRef, bytes, count, plain } = D;

  const HEIGHT = 88;
  const OVERVIEW = 12;
  const MORPH_MS = 900;
  const MORPH_SEGMENTS_MAX = 3000;
  const ZOOM_MAX = 4096;

  /** Cumulated bytes: segment i lies between starts[i] and starts[i + 1]. */
  function startsOf(segments) {
    const starts = new Float64Array(segments.length + 1);
    for (let i = 0; i < segments.length; i += 1) starts[i + 1] = starts[i] + segments[i].size_bytes;
    return starts;
  }

  function indexAt(starts, at) {
    let low = 0;
    let high = starts.length - 2;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (starts[middle] <= at) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  /** Where an offset lies in the log's bytes; inside of a segment by its share of offsets. */
  function bytesAt(segments, starts, offset) {
    let low = 0;
    let high = segments.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (segments[middle].end_offset <= offset) low = middle + 1;
      else high = middle;
    }
    if (low >= segments.length) return starts[segments.length];
    const { base_offset, end_offset, size_bytes } = segments[low];
    const share = offset <= base_offset ? 0 : (offset - base_offset) / (end_offset - base_offset);
    return starts[low] + share * size_bytes;
  }

  /** Neighbours of one section, drawn as one rectangle. */
  function runsOf(segments, starts) {
    const runs = [];
    for (let i = 0; i < segments.length; i += 1) {
      const last = runs[runs.length - 1];
      if (last && last.section === segments[i].section) last.end = starts[i + 1];
      else runs.push({ section: segments[i].section, begin: starts[i], end: starts[i + 1] });
    }
    return runs;
  }

  const ease = (t) => (t < 0.5 ? 4 * t ** 3 : 1 - (-2 * t + 2) ** 3 / 2);

  class Strip extends Component {
    constructor(props) {
      super();
      this.main = createRef();
      this.mini = createRef();
      this.state = { selected: null, from: 0, to: 1 };
      this.take(props.log);
      this.peak = this.total;
    }
    take(log) {
      this.segments = log.segments;
      this.starts = startsOf(log.segments);
      this.total = this.starts[log.segments.length];
      this.peak = Math.max(this.peak || 0, this.total);
      this.runs = runsOf(this.segments, this.starts);
    }
    /** The bytes that the whole width stands for: the largest size seen, so that a compaction is seen to shrink the log. */
    get width_bytes() {
      return this.peak || 1;
    }
    componentWillReceiveProps(next) {
      if (next.log === this.props.log) return;
      const before = { segments: this.segments, starts: this.starts, scale: this.width_bytes };
      const old = this.key();
      const chosen = this.state.selected === null ? null : this.segments[this.state.selected];
      this.take(next.log);
      if (chosen) {
        const at = this.segments.findIndex((s) => s.base_offset === chosen.base_offset);
        this.setState({ selected: at < 0 ? null : at });
      }
      if (this.key() !== old) this.morph(before);
    }
    key() {
      return this.segments.map((s) => `${s.base_offset}:${s.size_bytes}:${s.section[0]}`).join();
    }
    componentDidMount() {
      this.resize = new ResizeObserver(() => this.draw());
      this.resize.observe(this.main.current);
      this.retheme = () => this.draw();
      D.themed.add(this.retheme);
      this.main.current.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
      this.draw();
    }
    componentDidUpdate() {
      if (!this.moving) this.draw();
    }
    componentWillUnmount() {
      this.resize.disconnect();
      D.themed.delete(this.retheme);
      cancelAnimationFrame(this.frame);
    }

    // --- drawing ---
    surface(canvas, height) {
      const ratio = window.devicePixelRatio || 1;
      const width = canvas.clientWidth;
      if (canvas.width !== Math.round(width * ratio)) canvas.width = Math.round(width * ratio);
      if (canvas.height !== Math.round(height * ratio)) canvas.height = Math.round(height * ratio);
      const paint = canvas.getContext("2d");
      paint.setTransform(ratio, 0, 0, ratio, 0, 0);
      paint.clearRect(0, 0, width, height);
      return [paint, width, ratio];
    }
    colors() {
      const found = {};
      for (const name of ["clean", "dirty", "uncleanable", "active", "track", "ink", "line", "free"]) found[name] = D.color(name);
      return found;
    }
    draw() {
      if (!this.main.current || !this.main.current.clientWidth) return;
      this.drawMain();
      this.drawOverview();
    }
    drawMain() {
      const [paint, width, ratio] = this.surface(this.main.current, HEIGHT);
      const colors = this.colors();
      const { from, to, selected } = this.state;
      const scale = width / ((to - from) * this.width_bytes);
      const x = (at) => (at - from * this.width_bytes) * scale;
      const snap = (value) => Math.round(value * ratio) / ratio;
      this.free(paint, colors, Math.max(0, x(this.total)), width);
      for (const run of this.runs) {
        const left = snap(x(run.begin));
        const right = Math.max(left + 1 / ratio, snap(x(run.end)));
        if (right < 0 || left > width) continue;
        this.block(paint, colors, run.section, left, right - left);
      }
      // A line between segments, as long as they are wide enough to be told apart.
      paint.fillStyle = colors.line;
      const first = indexAt(this.starts, from * this.width_bytes);
      for (let i = Math.max(1, first); i < this.segments.length; i += 1) {
        const at = x(this.starts[i]);
        if (at > width) break;
        if ((this.starts[i + 1] - this.starts[i]) * scale >= 4) paint.fillRect(snap(at), 0, 1, HEIGHT - 8);
      }
      if (selected !== null && selected < this.segments.length) {
        const left = x(this.starts[selected]);
        paint.strokeStyle = colors.ink;
        paint.lineWidth = 2;
        paint.strokeRect(left + 1, 1, Math.max(2, x(this.starts[selected + 1]) - left - 2), HEIGHT - 2);
      }
    }
    /** One block. Its lowest pixels are plain colour, the rest has a grain that tells sections apart without colour. */
    block(paint, colors, section, left, width, alpha = 1) {
      paint.globalAlpha = alpha;
      paint.fillStyle = colors[section];
      paint.fillRect(left, 0, width, HEIGHT);
      if ((section === "uncleanable" || section === "active") && width > 3) {
        paint.save();
        paint.beginPath();
        paint.rect(left, 0, width, HEIGHT - 8);
        paint.clip();
        paint.strokeStyle = colors.line;
        paint.lineWidth = 1;
        paint.beginPath();
        const gap = section === "active" ? 14 : 7;
        const begin = Math.floor((Math.max(0, left) - HEIGHT) / gap) * gap;
        const end = Math.min(left + width, this.main.current.clientWidth);
        for (let x = begin; x < end; x += gap) {
          paint.moveTo(x, HEIGHT);
          paint.lineTo(x + HEIGHT, 0);
        }
        paint.stroke();
        paint.restore();
      }
      paint.globalAlpha = 1;
    }
    free(paint, colors, left, width) {
      paint.fillStyle = colors.free;
      paint.fillRect(left, 0, Math.max(0, width - left), HEIGHT);
    }
    drawOverview() {
      if (!this.mini.current) return;
      const [paint, width] = this.surface(this.mini.current, OVERVIEW);
      const colors = this.colors();
      const scale = width / this.width_bytes;
      paint.fillStyle = colors.free;
      paint.fillRect(0, 0, width, OVERVIEW);
      for (const run of this.runs) {
        paint.fillStyle = colors[run.section];
        paint.fillRect(run.begin * scale, 0, Math.max(0.5, (run.end - run.begin) * scale), OVERVIEW);
      }
      paint.strokeStyle = colors.ink;
      paint.lineWidth = 2;
      paint.strokeRect(this.state.from * width + 1, 1, Math.max(4, (this.state.to - this.state.from) * width - 2), OVERVIEW - 2);
    }

    // --- the old strip turns into the new one ---
    morph(before) {
      const calm = window.matchMedia("(prefers-reduced-motion: reduce)").matches;
      const zoomed = this.state.to - this.state.from < 1;
      if (calm || zoomed || before.segments.length + this.segments.length > MORPH_SEGMENTS_MAX) return;
      const blocks = this.blocks(before);
      const begun = performance.now();
      this.moving = true;
      cancelAnimationFrame(this.frame);
      const step = (now) => {
        const t = Math.min(1, (now - begun) / MORPH_MS);
        if (t >= 1 || !this.main.current) {
          this.moving = false;
          this.draw();
          return;
        }
        this.drawBetween(blocks, ease(t));
        this.frame = requestAnimationFrame(step);
      };
      this.frame = requestAnimationFrame(step);
    }
    blocks(before) {
      const at = new Map(before.segments.map((s, i) => [s.base_offset, i]));
      const share = (starts, i, scale) => [starts[i] / scale, starts[i + 1] / scale];
      const found = this.segments.map((segment, i) => {
        const [left, right] = share(this.starts, i, this.width_bytes);
        const old = at.get(segment.base_offset);
        if (old === undefined) return { section: segment.section, left0: left, right0: left, left, right };
        at.delete(segment.base_offset);
        const [left0, right0] = share(before.starts, old, before.scale);
        return { section: segment.section, was: before.segments[old].section, left0, right0, left, right };
      });
      for (const i of at.values()) {
        // Taken over by the segment that now holds its offsets.
        const [left0, right0] = share(before.starts, i, before.scale);
        const to = bytesAt(this.segments, this.starts, before.segments[i].base_offset) / this.width_bytes;
        found.push({ section: before.segments[i].section, left0, right0, left: to, right: to, gone: true });
      }
      return found;
    }
    drawBetween(blocks, t) {
      const [paint, width] = this.surface(this.main.current, HEIGHT);
      const colors = this.colors();
      this.free(paint, colors, 0, width);
      const between = (a, b) => (a + (b - a) * t) * width;
      for (const each of blocks) {
        const left = between(each.left0, each.left);
        const span = between(each.right0, each.right) - left;
        if (span <= 0) continue;
        if (each.was && each.was !== each.section) this.block(paint, colors, each.was, left, span);
        const alpha = each.gone ? 1 - t : each.was && each.was !== each.section ? t : 1;
        this.block(paint, colors, each.section, left, span, alpha);
      }
    }

    // --- pointer and keys ---
    zoom(factor, middle) {
      const { from, to } = this.state;
      const span = Math.min(1, Math.max(1 / ZOOM_MAX, (to - from) / factor));
      const centre = middle === undefined ? (from + to) / 2 : middle;
      const share = (centre - from) / (to - from);
      const left = Math.max(0, Math.min(1 - span, centre - share * span));
      this.setState({ from: left, to: left + span });
    }
    pan(by) {
      const { from, to } = this.state;
      const left = Math.max(0, Math.min(1 - (to - from), from + by));
      this.setState({ from: left, to: left + (to - from) });
    }
    place(event, canvas) {
      const box = canvas.getBoundingClientRect();
      return Math.max(0, Math.min(1, (event.clientX - box.left) / box.width));
    }
    wheel(event) {
      if (!event.ctrlKey && !event.metaKey && !event.shiftKey) return;
      event.preventDefault();
      const { from, to } = this.state;
      const at = from + this.place(event, this.main.current) * (to - from);
      if (event.shiftKey) this.pan(((event.deltaY || event.deltaX) / 1000) * (to - from));
      else this.zoom(event.deltaY < 0 ? 1.4 : 1 / 1.4, at);
    }
    point(event) {
      const { from, to } = this.state;
      const at = (from + this.place(event, this.main.current) * (to - from)) * this.width_bytes;
      if (!this.segments.length) return;
      this.setState({ selected: at > this.total ? null : indexAt(this.starts, at) });
    }
    drag(event) {
      if (event.buttons !== 1) return;
      const { from, to } = this.state;
      const at = this.place(event, this.mini.current) - (to - from) / 2;
      this.pan(at - from);
    }
    choose(index) {
      if (!this.segments.length) return;
      const selected = Math.max(0, Math.min(this.segments.length - 1, index));
      this.setState({ selected });
      const { from, to } = this.state;
      const left = this.starts[selected] / this.width_bytes;
      const right = this.starts[selected + 1] / this.width_bytes;
      if (left < from || right > to) this.pan((left + right) / 2 - (from + to) / 2);
    }
    keys(event) {
      const at = this.state.selected;
      const moves = {
        ArrowRight: () => this.choose(at === null ? 0 : at + 1),
        ArrowLeft: () => this.choose(at === null ? this.segments.length - 1 : at - 1),
        PageDown: () => this.choose((at || 0) + Math.max(1, Math.round(this.segments.length / 20))),
        PageUp: () => this.choose((at || 0) - Math.max(1, Math.round(this.segments.length / 20))),
        Home: () => this.choose(0),
        End: () => this.choose(this.segments.length - 1),
        "+": () => this.zoom(2, this.centre()),
        "=": () => this.zoom(2, this.centre()),
        "-": () => this.zoom(0.5, this.centre()),
        Escape: () => this.setState({ selected: null, from: 0, to: 1 }),
      };
      if (!(event.key in moves) || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      moves[event.key]();
    }
    centre() {
      const { selected } = this.state;
      return selected === null ? undefined : (this.starts[selected] + this.starts[selected + 1]) / 2 / this.width_bytes;
    }
    said(index) {
      if (index === null || !this.segments[index]) {
        return `${D.plural(this.props.log.segments_total, "segment")}, ${bytes(this.total)}. Use the arrow keys.`;
      }
      const s = this.segments[index];
      const what = s.count > 1 ? `${count(s.count)} segments` : "segment";
      const when = s.largest_timestamp_ms === null ? "" : `, newest record ${D.time(s.largest_timestamp_ms)}`;
      return `${what} from offset ${count(s.base_offset)}, ${s.section}, ${bytes(s.size_bytes)}${when}`;
    }

    marker(offset, label, kind) {
      const at = bytesAt(this.segments, this.starts, offset) / this.width_bytes;
      const place = (at - this.state.from) / (this.state.to - this.state.from);
      if (place < -0.001 || place > 1.001) return null;
      const side = place > 0.5 ? "left" : "right";
      return html`<div class=${`mark mark-${kind} mark-${side}`} style=${{ left: `${(place * 100).toFixed(3)}%` }}>
        <span>${label} <b class="num">${count(offset)}</b></span></div>`;
    }
    detail() {
      const { selected } = this.state;
      const s = selected === null ? null : this.segments[selected];
      if (!s) {
        const freed = this.peak - this.total;
        return html`<p class="strip-hint">${freed > 0 ? html`<b class="freed">${bytes(freed)} freed</b> since this page was opened. ` : null}
          <span class="fine">Point at a segment, or use <kbd>←</kbd> <kbd>→</kbd>; <kbd>+</kbd> <kbd>−</kbd> zoom.</span><span class="coarse">Tap a segment to see what it holds.</span></p>`;
      }
      const items = [
        ["base offset", count(s.base_offset)],
        ["end offset", count(s.end_offset)],
        ["size", bytes(s.size_bytes)],
        ["newest record", s.largest_timestamp_ms === null ? "–" : D.time(s.largest_timestamp_ms)],
        ["records", count(s.records)],
        ["keys", count(s.keys)],
        ["tombstones", count(s.tombstones)],
      ];
      return html`<dl class="strip-detail"><div><dt>${s.count > 1 ? `${count(s.count)} segments` : "segment"}</dt><dd><i class=${`swatch bg-${s.section}`}></i>${s.section}</dd></div>
        ${items.map(([name, value]) => html`<div><dt>${name}</dt><dd class="num">${value}</dd></div>`)}
        ${s.run_id ? html`<div><dt>written by</dt><dd><a href=${`#/runs/${encodeURIComponent(s.run_id)}`}><${D.Text} text=${s.run_id} max=${28} /></a></dd></div>` : null}</dl>`;
    }
    render({ log, progress }, { selected, from, to }) {
      const zoomed = to - from < 1;
      const active = log.segments.reduce((sum, s) => sum + (s.section === "active" ? s.size_bytes : 0), 0);
      const uncleanable = log.uncleanable_bytes - active;
      return html`<div class="strip">
        <div class="strip-marks" aria-hidden="true">
          ${this.marker(log.first_dirty_offset, "first dirty", "dirty")}
          ${this.marker(log.first_uncleanable_offset, "first uncleanable", "uncleanable")}
        </div>
        <div class="strip-main" role="slider" tabindex="0" aria-label=${`Segments of ${plain(log.topic)}-${log.partition}`} aria-valuemin="1"
            aria-valuemax=${Math.max(1, this.segments.length)} aria-valuenow=${selected === null ? 1 : selected + 1} aria-valuetext=${this.said(selected)}
            onKeyDown=${(event) => this.keys(event)}>
          <canvas ref=${this.main} data-bytes=${this.total} data-width-bytes=${this.width_bytes} onPointerMove=${(event) => this.point(event)}
            onPointerDown=${(event) => this.point(event)}></canvas>
          ${this.peak > this.total && !zoomed && (this.peak - this.total) / this.peak > 0.12
            ? html`<span class="strip-freed" style=${{ left: `${((100 * this.total) / this.peak).toFixed(2)}%` }}>${bytes(this.peak - this.total)} freed</span>` : null}
        </div>
        ${progress ? html`<div class="strip-progress"><i style=${{ width: `${(100 * progress).toFixed(1)}%` }}></i></div>` : html`<div class="strip-progress"></div>`}
        <div class="strip-scale num"><span>${bytes(from * this.width_bytes)}</span><span>${bytes(to * this.width_bytes)}</span></div>
        <canvas class=${zoomed ? "strip-mini" : "strip-mini hidden"} ref=${this.mini} aria-hidden="true"
          onPointerDown=${(event) => { event.currentTarget.setPointerCapture(event.pointerId); this.drag(event); }} onPointerMove=${(event) => this.drag(event)}></canvas>
        <div class="strip-foot">
          <${D.Legend} items=${[
            ["clean", "clean", bytes(log.clean_bytes), D.SECTIONS.clean],
            ["dirty", "dirty", bytes(log.dirty_bytes), D.SECTIONS.dirty],
            ["uncleanable", "uncleanable", bytes(uncleanable), D.SECTIONS.uncleanable],
            ["active", "active", bytes(active), D.SECTIONS.active],
          ]} />
          <div class="zoom" role="group" aria-label="Zoom">
            <button type="button" aria-label="Zoom out" disabled=${!zoomed} onClick=${() => this.zoom(0.5, this.centre())}>−</button>
            <button type="button" aria-label="Whole log" disabled=${!zoomed} onClick=${() => this.setState({ from: 0, to: 1 })}>all</button>
            <button type="button" aria-label="Zoom in" onClick=${() => this.zoom(2, this.centre())}>+</button>
          </div>
        </div>
        <div class="strip-info">${this.detail()}</div>
      </div>`;
    }
  }

  Object.assign(D, { Strip });
})();
