// Charts over time, by uPlot, and sparklines. Each says in words what it shows.
"use strict";
(() => {
  const D = window.duramen;
  const { html, Component, createRef, bytes, short, time } = D;

  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const themed = new Set();
  D.onTheme = () => themed.forEach((redraw) => redraw());

  /** Round places on an axis from 0 to `high`: powers of two for bytes, else 1, 2 or 5 times a power of ten. */
  function rounds(high, unit) {
    const power = 10 ** Math.floor(Math.log10(Math.max(high, 1) / 4));
    const step = unit === "bytes" ? 2 ** Math.ceil(Math.log2(high / 4)) : [1, 2, 5, 10].map((n) => n * power).find((n) => high / n <= 4);
    const found = [];
    for (let at = 0; at <= high; at += Math.max(1, step)) found.push(at);
    return found;
  }
  /** "2.00 MiB" → "2 MiB", as the places are round. */
  const trimmed = (said) => said.replace(/(\.\d*?)0+(?=\D|$)/, "$1").replace(/\.(?=\D|$)/, "");

  function tooltip(series, format) {
    let box;
    return {
      hooks: {
        init: (plot) => {
          box = document.createElement("div");
          box.className = "chart-tip";
          box.hidden = true;
          plot.over.appendChild(box);
          plot.over.addEventListener("mouseleave", () => (box.hidden = true));
        },
        setCursor: (plot) => {
          const { idx, left } = plot.cursor;
          if (idx === null || idx === undefined || left < 0) {
            box.hidden = true;
            return;
          }
          box.hidden = false;
          box.textContent = "";
          const head = document.createElement("b");
          head.textContent = time(plot.data[0][idx] * 1000);
          box.appendChild(head);
          for (const [i, each] of series.entries()) {
            const line = document.createElement("div");
            const swatch = document.createElement("i");
            swatch.className = `swatch bg-${each.color}`;
            line.append(swatch, `${each.label} `, format(each.value ? each.value(idx) : plot.data[i + 1][idx]));
            box.appendChild(line);
          }
          const right = left > plot.over.clientWidth / 2;
          box.style.left = right ? "" : `${left + 12}px`;
          box.style.right = right ? `${plot.over.clientWidth - left + 12}px` : "";
        },
      },
    };
  }

  /** series: {label, color (a CSS variable), fill, bars, values}; `times` in milliseconds. */
  class TimeChart extends Component {
    constructor() {
      super();
      this.box = createRef();
    }
    shouldComponentUpdate(next) {
      if (next.label !== this.props.label && this.box.current) this.box.current.setAttribute("aria-label", next.label);
      const same = next.series.length === this.props.series.length && next.unit === this.props.unit;
      this.props = next;
      if (!this.plot || !same) this.make();
      else this.plot.setData(this.columns());
      return false;
    }
    columns() {
      return [this.props.times.map((ms) => ms / 1000), ...this.props.series.map((each) => each.values)];
    }
    make() {
      if (this.plot) this.plot.destroy();
      const box = this.box.current;
      const { series, height, unit } = this.props;
      const format = unit === "bytes" ? bytes : short;
      const axis = { stroke: color("muted"), font: "11px system-ui, sans-serif", ticks: { show: false }, grid: { stroke: color("grid"), width: 1 } };
      this.plot = new window.uPlot(
        {
          width: Math.max(120, box.clientWidth),
          height: height || 170,
          padding: [8, 12, 0, 0],
          legend: { show: false },
          cursor: { y: false, points: { size: 6 }, drag: { x: false, y: false } },
          // A single moment has no length of its own.
          scales: { x: { range: (_, low, high) => (low === high ? [low - 60, high + 60] : [low, high]) }, y: { range: (_, low, high) => [0, high > 0 ? high * 1.08 : 1] } },
          axes: [
            { ...axis, space: 70, size: 26, values: (_, splits) => splits.map((s, i) => this.tick(s, splits, i)) },
            { ...axis, size: 62, splits: (_, __, low, high) => rounds(high, unit), values: (_, splits) => splits.map((v) => (v === 0 ? "0" : trimmed(format(v)))) },
          ],
          series: [
            {},
            ...series.map((each) => ({
              stroke: color(each.color),
              width: each.bars ? 0 : 1.5,
              fill: each.fill ? `${color(each.color)}${each.bars ? "" : "30"}` : undefined,
              paths: each.bars ? window.uPlot.paths.bars({ size: [0.75, 40] }) : undefined,
              points: { show: this.props.times.length < 2 },
            })),
          ],
          plugins: [tooltip(series, format)],
        },
        this.columns(),
        box,
      );
      // The drawing is one picture with a label; what is inside is not read out.
      box.firstChild.setAttribute("aria-hidden", "true");
    }
    tick(seconds, splits) {
      const said = time(seconds * 1000);
      return splits.length > 1 && splits[1] - splits[0] >= 86400 ? said.slice(5, 10) : said.slice(11, 16);
    }
    componentDidMount() {
      this.make();
      this.resize = new ResizeObserver(() => {
        const width = this.box.current && this.box.current.clientWidth;
        if (this.plot && width && Math.abs(width - this.plot.width) > 1) this.plot.setSize({ width, height: this.plot.height });
      });
      this.resize.observe(this.box.current);
      this.retheme = () => this.make();
      themed.add(this.retheme);
    }
    componentWillUnmount() {
      themed.delete(this.retheme);
      this.resize.disconnect();
      if (this.plot) this.plot.destroy();
    }
    render() {
      return html`<div class="chart" ref=${this.box} role="img" aria-label=${this.props.label}></div>`;
    }
  }

  /** How a number went, without axes. */
  function Sparkline({ points, field, label, width = 120, height = 26 }) {
    if (!points || points.length < 2) return html`<span class="faint spark-none">–</span>`;
    const values = points.map((p) => p[field]);
    const low = Math.min(...values);
    const high = Math.max(...values);
    const begin = points[0].time_ms;
    const span = points[points.length - 1].time_ms - begin || 1;
    const y = (v) => height - 3 - ((v - low) / (high - low || 1)) * (height - 7) - (high === low ? (height - 7) / 2 : 0);
    const path = points.map((p, i) => `${i ? "L" : "M"}${(((p.time_ms - begin) / span) * (width - 5) + 1).toFixed(1)} ${y(p[field]).toFixed(1)}`).join("");
    const last = values[values.length - 1];
    return html`<svg class="spark" viewBox=${`0 0 ${width} ${height}`} width=${width} height=${height} role="img" aria-label=${label}>
      <path class="spark-area" d=${`${path}L${width - 4} ${height}L1 ${height}Z`} /><path class="spark-line" d=${path} />
      <circle class="spark-dot" cx=${width - 4} cy=${y(last).toFixed(1)} r="2" /></svg>`;
  }

  const growth = (points) => {
    if (!points || points.length < 2) return "no history yet";
    const [a, b] = [points[0], points[points.length - 1]];
    return `from ${bytes(a.size_bytes)} to ${bytes(b.size_bytes)} in ${D.duration(b.time_ms - a.time_ms)}`;
  };

  const HistoryChart = ({ points, label, height }) =>
    points.length === 0
      ? D.inBucket() ? html`<${D.Empty} title="No history">None is kept in a bucket.<//>` : html`<${D.Empty} title="No history yet">The first point is kept within a minute.<//>`
      : html`<${TimeChart} unit="bytes" height=${height} times=${points.map((p) => p.time_ms)} label=${`${label}: ${growth(points)}`}
          series=${[
            { label: "size", color: "clean", fill: true, values: points.map((p) => p.size_bytes) },
            { label: "dirty", color: "dirty", fill: true, values: points.map((p) => p.dirty_bytes) },
          ]} />`;

  Object.assign(D, { TimeChart, rounds, Sparkline, HistoryChart, growth, color, themed });
})();
