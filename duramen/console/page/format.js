// Numbers, sizes and times as people read them, and text that cannot deceive. The first script: it makes the namespace.
"use strict";
window.duramen = (() => {
  const { h, render, Component, Fragment, createRef } = window.preact;
  const html = window.htm.bind(h);

  const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

  function scaled(value, step, units) {
    let size = Math.abs(value);
    let unit = 0;
    while (size >= step && unit < units.length - 1) {
      size /= step;
      unit += 1;
    }
    const digits = unit === 0 || size >= 100 ? 0 : size >= 10 ? 1 : 2;
    return [(value < 0 ? "−" : "") + size.toFixed(digits), units[unit]];
  }

  /** 16777216 → "16.0 MiB" */
  const bytes = (value) => (value === null || value === undefined ? "–" : scaled(value, 1024, UNITS).join(" "));
  /** 28000000 → "28.0 M" */
  const short = (value) =>
    value === null || value === undefined ? "–" : scaled(value, 1000, ["", "k", "M", "G", "T"]).join(" ").trim();
  /** 28000000 → "28,000,000" */
  const count = (value) => (value === null || value === undefined ? "–" : value.toLocaleString("en-US"));
  /** "≤ 2,000" where it is a bound and no count */
  const atMost = (isExact, said) => (isExact || said === "0" ? said : `≤ ${said}`);
  /** 0.375 → "0.375"; at most three digits, so that a threshold and a ratio can be compared by eye */
  const ratio = (value) => (value === null || value === undefined ? "–" : value.toFixed(3).replace(/0$/, ""));
  /** The same for a column, where all have three digits. */
  const ratio3 = (value) => (value === null || value === undefined ? "–" : value.toFixed(3));
  const percent = (value) => (value === null || value === undefined ? "–" : value > 0 && value < 0.001 ? "< 0.1 %" : `${(value * 100).toFixed(value < 0.1 ? 1 : 0)} %`);
  const plural = (n, one, many) => `${count(n)} ${n === 1 ? one : many || one + "s"}`;

  const SPANS = [
    ["d", 86400000],
    ["h", 3600000],
    ["m", 60000],
    ["s", 1000],
  ];

  /** 5400000 → "1 h 30 m": the two largest units */
  function duration(ms) {
    if (ms === null || ms === undefined) return "–";
    const size = Math.abs(ms);
    if (size < 1000) return `${Math.round(size)} ms`;
    if (size < 10000) return `${(size / 1000).toFixed(1).replace(/\.0$/, "")} s`;
    const first = SPANS.findIndex(([, span]) => size >= span);
    const [unit, span] = SPANS[first];
    const whole = Math.floor(size / span);
    if (first === SPANS.length - 1) return `${whole} s`;
    const [unit2, span2] = SPANS[first + 1];
    const rest = Math.floor((size - whole * span) / span2);
    return rest ? `${whole} ${unit} ${rest} ${unit2}` : `${whole} ${unit}`;
  }

  const two = (n) => String(n).padStart(2, "0");
  const UNLIMITED = 9.2e18;
  /** What a setting's number means, where its name says the unit: "604800000" of retention.ms → "7 d". */
  function reading(name, value) {
    const number = /^\d/.test(value) ? Number(value) : NaN;
    if (Number.isNaN(number)) return "";
    if (number >= UNLIMITED) return "no limit";
    if (/\.ms$/.test(name) && number >= 1000) return duration(number);
    if (/\.(bytes|size)$/.test(name) && number >= 1024) return bytes(number);
    return "";
  }

  const valid = (ms) => ms !== null && ms !== undefined && Math.abs(ms) < 8.64e15;

  /** Local time, 2026-11-18 16:43:07 */
  function time(ms) {
    if (!valid(ms)) return "–";
    const d = new Date(ms);
    return (
      `${d.getFullYear()}-${two(d.getMonth() + 1)}-${two(d.getDate())} ` +
      `${two(d.getHours())}:${two(d.getMinutes())}:${two(d.getSeconds())}`
    );
  }
  const clockTime = (ms) => (valid(ms) ? time(ms).slice(11) : "–");
  const utc = (ms) => (valid(ms) ? new Date(ms).toISOString() : "");

  // What the eye cannot see, or what turns the reading direction: controls, format characters, marks without width,
  // unpaired surrogates.
  const ODD =
    /[\u0000-\u001f\u007f-\u009f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202f\u205f-\u206f\u3164\ufeff\uffa0\ufff0-\uffff\u{e0000}-\u{e0fff}\ud800-\udfff]/gu;
  const NAMES = {
    0xad: "soft hyphen", 0x61c: "Arabic letter mark", 0x200b: "zero width space", 0x200c: "zero width non-joiner",
    0x200d: "zero width joiner", 0x200e: "left-to-right mark", 0x200f: "right-to-left mark", 0x2028: "line separator",
    0x2029: "paragraph separator", 0x202a: "left-to-right embedding", 0x202b: "right-to-left embedding",
    0x202c: "pop directional formatting", 0x202d: "left-to-right override", 0x202e: "right-to-left override",
    0x2066: "left-to-right isolate", 0x2067: "right-to-left isolate", 0x2068: "first strong isolate",
    0x2069: "pop directional isolate", 0xfeff: "byte order mark", 0xfffd: "replacement character",
  };

  function chip(character) {
    const code = character.codePointAt(0);
    const label = `U+${code.toString(16).toUpperCase().padStart(4, "0")}`;
    const title = NAMES[code] ? `${label} ${NAMES[code]}` : label;
    const shown = code < 0x20 ? String.fromCodePoint(0x2400 + code) : code === 0x7f ? "␡" : label;
    const mark = html`<span class="odd" title=${title}>${shown}</span>`;
    return mark;
  }

  /** Children for text from a record, a name or a setting: every odd character becomes a visible chip. */
  function visible(text, lines) {
    const found = [];
    let last = 0;
    for (const match of text.matchAll(ODD)) {
      if (lines && (match[0] === "\n" || match[0] === "\t")) continue; // seen as what they are
      if (match.index > last) found.push(text.slice(last, match.index));
      found.push(chip(match[0]));
      last = match.index + match[0].length;
    }
    if (last < text.length) found.push(text.slice(last));
    return found;
  }

  /** Lines may break behind the dots of a long name: "min.cleanable.dirty.ratio". */
  const breakable = (part) =>
    typeof part === "string" && /\S{16}/.test(part) ? part.split(/(?<=\w\.)(?=\w)/).flatMap((piece, i) => (i ? [html`<wbr />`, piece] : [piece])) : [part];

  /** Foreign text in a line: isolated from its surroundings, cut behind `max` characters. */
  function Text({ text, max, lines, ...rest }) {
    const whole = text === null || text === undefined ? "–" : String(text);
    const cut = max && whole.length > max;
    return html`<bdi ...${rest}>${visible(cut ? whole.slice(0, max) : whole, lines).flatMap(lines ? (part) => [part] : breakable)}${cut ? "…" : null}</bdi>`;
  }

  /** Our own sentences, written for a terminal: commands in them need no quotes here. */
  const unquoted = (text) => text.replace(/`([^`]*)`/g, "$1");

  /** The same for a title or an aria-label, which has no chips. */
  const plain = (text) =>
    String(text ?? "").replace(ODD, (c) => `[U+${c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}]`);

  return {
    h, html, render, Component, Fragment, createRef, ...window.preactHooks,
    bytes, short, count, atMost, ratio, ratio3, percent, plural, duration, reading, time, clockTime, utc, scaled, Text, visible, plain, unquoted,
    pages: {},
  };
})();
