// The page of the planner: controls as lpkit names them, Python to answer, and what it says as text and bars; beside it, if
// somebody held one, an earlier answer. The address holds both.
// What is measured: performance.measure "first" (from the navigation to the first answer) and "move" (from an input to its drawing).

import { loadPyodide } from "./pyodide/pyodide.mjs";

const here = name => new URL(name, import.meta.url).href;
const get = id => document.getElementById(id);
const made = (tag, props = {}, ...children) => {
  const element = Object.assign(document.createElement(tag), props);
  element.append(...children);
  return element;
};
const controls = new Map(); // by name: {label, read() -> value, told(text) -> value or undefined, write(text)}
let answer; // Python's, once it is there
let held = null; // {asked, said}: the configuration beside
let now = null; // the same of what is set

const lastLine = error => String(error).trim().split("\n").pop();

function say(words, error = false) {
  get("status").textContent = words;
  get("status").classList.toggle("error", error);
}

// ---- controls

function chooser({ name, label, options, value }) {
  const box = made("select", { id: name }, ...options.map(([key, text]) => made("option", { value: key, textContent: text })));
  box.value = value;
  const told = text => (options.some(([key]) => key === text) ? text : undefined);
  controls.set(name, { label, read: () => box.value, told, write: text => (box.value = text) });
  return made("div", { className: "control" }, made("label", { htmlFor: name, textContent: label }), box);
}

function number(name, value) {
  const box = made("input", { id: name, type: "number", min: 0, step: "any", inputMode: "decimal" });
  box.value = value ?? "";
  return box;
}

// What an address may hold: a finite number that is not below zero.
const plain = text => (/^\d{1,16}(\.\d{1,12})?$/.test(text) ? Number(text) : undefined);

function slider({ name, label, steps, value }) {
  const nearest = x => steps.reduce((best, step, i) => (Math.abs(step - x) < Math.abs(steps[best] - x) ? i : best), 0);
  const box = number(name, value);
  const range = made("input", { type: "range", min: 0, max: steps.length - 1, step: 1, value: nearest(value), ariaLabel: label });
  const spoken = () => range.setAttribute("aria-valuetext", box.value);
  range.addEventListener("input", () => ((box.value = steps[range.value]), spoken()));
  box.addEventListener("input", () => ((range.value = nearest(Number(box.value))), spoken()));
  const write = text => ((box.value = text), (range.value = nearest(Number(text))), spoken());
  spoken();
  controls.set(name, { label, read: () => (box.value === "" ? null : Number(box.value)), told: plain, write });
  return made("div", { className: "control" }, made("label", { htmlFor: name, textContent: label }), range, box);
}

function optional({ name, label }) {
  const box = number(name, null);
  const told = text => (text === "" ? null : plain(text));
  controls.set(name, { label, read: () => (box.value === "" ? null : Number(box.value)), told, write: text => (box.value = text) });
  return made("div", { className: "control short" }, made("label", { htmlFor: name, textContent: label }), box);
}

const kindOf = control => (control.options ? chooser : control.steps ? slider : optional)(control);
const asked = () => Object.fromEntries([...controls].map(([name, control]) => [name, control.read()]));

// ---- the address keeps what was set, and what was held; what it holds is compared with the controls, and is never run

const HELD = "held.";

function keep() {
  const words = (values, before = "") =>
    Object.entries(values).filter(([, value]) => value !== null).map(([name, value]) => [before + name, value]);
  history.replaceState(null, "", `#${new URLSearchParams([...words(asked()), ...(held ? words(held.asked, HELD) : [])])}`);
}

// Sets the controls, and returns a sentence about what cannot be set. What an address leaves out stays at its start.
function recall() {
  const refused = [], set = new Map(), beside = new Map();
  for (const [key, text] of new URLSearchParams(location.hash.slice(1))) {
    const [into, name] = key.startsWith(HELD) ? [beside, key.slice(HELD.length)] : [set, key];
    const value = controls.get(name)?.told(text);
    if (value === undefined) refused.push(`${key}=${text}`.slice(0, 60));
    else into.set(name, value);
  }
  const whole = chosen => Object.fromEntries([...starts].map(([name, value]) => [name, chosen.has(name) ? chosen.get(name) : value]));
  if (set.size) for (const [name, value] of Object.entries(whole(set))) controls.get(name).write(value === null ? "" : String(value));
  held = beside.size ? { asked: whole(beside), said: null } : null;
  return refused.length ? `The address holds what cannot be set here, and it is left out: ${refused.slice(0, 3).join(", ")}.` : "";
}

const starts = new Map(); // the first value of each control

// ---- the answer

const kept = new Map(); // the elements of a row, by its chart and name: one that was opened stays open

function row(chart, { name, size, text, formula, source, hidden = 0 }, { whole, limit }, colour) {
  const key = `${chart.id}/${name}`;
  if (!kept.has(key)) {
    const parts = { bar: made("div", { className: "bar" }), text: made("span"), formula: made("p"), source: made("p") };
    const summary = made("summary", {}, made("span", { textContent: name }), made("div", { className: "track" }, parts.bar), parts.text);
    parts.all = made("details", { className: "row" }, summary, parts.formula, parts.source);
    kept.set(key, parts);
  }
  const parts = kept.get(key);
  parts.bar.style.width = `${(100 * (size || hidden)) / Math.max(whole, limit)}%`;
  parts.bar.style.background = colour;
  parts.bar.classList.toggle("hidden", !size);
  parts.text.textContent = text;
  parts.formula.textContent = formula;
  parts.source.textContent = source;
  return parts.all;
}

function stacked(said, most, colourOf) {
  let start = 0;
  const stack = made("div", { className: "track stack", ariaHidden: true });
  for (const { name, size } of said.rows) {
    const bar = made("div", { className: "bar", title: name });
    Object.assign(bar.style, { left: `${(100 * start) / most}%`, width: `${(100 * size) / most}%`, background: colourOf(name) });
    stack.append(bar);
    start += size;
  }
  if (said.whole > said.limit) {
    const limit = made("div", { className: "limit", title: "the device's memory" });
    limit.style.left = `${(100 * said.limit) / most}%`;
    stack.append(limit);
  }
  return stack;
}

function draw(chart, said, other, colours) {
  const colourOf = name => colours[name] ?? colours[name.includes(":") ? ":" : ""];
  const most = Math.max(said.whole, said.limit, other?.whole ?? 0, other?.limit ?? 0);
  const [title, beside, rows] = chart.children;
  title.textContent = said.title;
  beside.textContent = said.beside;
  const stacks = [stacked(said, most, colourOf)];
  if (other) {
    stacks.unshift(made("p", { className: "which", textContent: "this" }));
    stacks.push(made("p", { className: "which", textContent: `held: ${other.title}` }), stacked(other, most, colourOf));
  }
  rows.replaceChildren(...stacks, ...said.rows.map(one => row(chart, one, said, colourOf(one.name))));
}

// ---- two configurations side by side

const NUMBERS = { step: "step_seconds", MFU: "mfu", "tokens/s": "tokens_per_second", run: "run_seconds", cost: "cost", energy: "energy_wh" };

function times(a, b) {
  if (!Number.isFinite(a) || !Number.isFinite(b) || !a || !b || a === b) return "";
  return `× ${(b / a).toPrecision(3)}`;
}

function line(name, before, after, by = "") {
  const words = [made("th", { scope: "row", textContent: name }), ...[before, after, by].map(text => made("td", { textContent: text }))];
  return made("tr", { className: before === after ? "" : "other" }, ...words);
}

function part(title, rows) {
  const head = made("tr", {}, made("th", { scope: "rowgroup", colSpan: 4, textContent: title }));
  return made("tbody", {}, head, ...rows);
}

function barRows(before, after) {
  const of = said => new Map(said.rows.map(one => [one.name, one]));
  const [a, b] = [of(before), of(after)];
  return [...new Set([...a.keys(), ...b.keys()])].map(name =>
    line(name, a.get(name)?.text ?? "none", b.get(name)?.text ?? "none", times(a.get(name)?.size, b.get(name)?.size)));
}

function compare() {
  get("both").hidden = !held;
  for (const id of ["swap", "release"]) get(id).hidden = !held;
  for (const name of controls.keys()) {
    get(name).closest(".control").classList.toggle("other", Boolean(held) && held.asked[name] !== now.asked[name]);
  }
  if (!held) return;
  const word = ({ asked, said }, name) => String(asked[name] ?? (said.usual?.[name] !== undefined ? `${said.usual[name]} (left out)` : "left out"));
  const set = [...controls].filter(([name]) => held.asked[name] !== now.asked[name])
    .map(([name, { label }]) => line(label, word(held, name), word(now, name)));
  const parts = [part("Settings that differ", set.length ? set : [line("none", "", "")])];
  const [before, after] = [held.said, now.said];
  if (before.error || after.error) {
    parts.push(part("Answer", [line("", before.error ?? before.verdict, after.error ?? after.verdict)]));
  } else {
    const facts = Object.keys(after.facts).map(name =>
      line(name, before.facts[name], after.facts[name], times(before.prediction[NUMBERS[name]], after.prediction[NUMBERS[name]])));
    parts.push(part("Answer", [line("memory", before.verdict, after.verdict), ...facts]));
    parts.push(part("A device at its peak", barRows(before.bytes, after.bytes)), part("A step", barRows(before.seconds, after.seconds)));
  }
  get("rows").replaceChildren(made("thead", {}, made("tr", {}, ...["", "held", "this", "this / held"].map(text => made("th", { scope: "col", textContent: text })))), ...parts);
}

function show(said, colours) {
  get("answer").hidden = false;
  get("answer").classList.toggle("stale", Boolean(said.error));
  get("answer").classList.toggle("none", Boolean(said.error) && !get("title").textContent); // no answer yet
  get("verdict").textContent = said.error ?? said.verdict;
  get("verdict").className = said.level ?? "";
  if (said.error) return;
  get("facts").replaceChildren(...Object.entries(said.facts).map(([name, text]) =>
    made("div", {}, made("dt", { textContent: name }), made("dd", { textContent: text }))));
  get("title").textContent = said.title;
  const other = held && !held.said.error ? held.said : null;
  draw(get("bytes"), said.bytes, other?.bytes, colours.bytes);
  draw(get("seconds"), said.seconds, other?.seconds, colours.seconds);
  get("command").replaceChildren(...said.command.split(" ").flatMap(word => [made("span", { textContent: word }), " "]));
  get("json").textContent = JSON.stringify(said.prediction, null, 1);
  for (const [name, text] of Object.entries(said.usual)) get(name).placeholder = text ?? "";
  get("sources").replaceChildren(...said.prediction.sources.map(text => made("li", { textContent: text })));
}

// ---- Python

async function python() {
  const [pyodide, zip] = await Promise.all([
    loadPyodide({ indexURL: here("pyodide/") }),
    fetch(here("lpkit.zip")).then(reply => reply.arrayBuffer()),
  ]);
  pyodide.unpackArchive(zip, "zip");
  return pyodide.pyimport("answer").answer;
}

async function start() {
  say("Python is loading: 13 MB, once.");
  const loading = python();
  const { groups, colours } = await (await fetch(here("choices.json"))).json();
  const form = get("controls");
  form.append(...groups.map(({ title, controls }) =>
    made("fieldset", {}, made("legend", { textContent: title }), ...controls.map(kindOf))));
  for (const [name, control] of controls) starts.set(name, control.read());
  let refused = recall();
  const said = values => ({ asked: values, said: JSON.parse(answer(JSON.stringify(values))) });
  const move = () => {
    const started = performance.now();
    try {
      say("");
      now = said(asked());
      if (held && !held.said) held = said(held.asked);
      show(now.said, colours);
      compare();
    } catch (error) {
      say(`The formulas broke off: ${lastLine(error)}`, true);
    }
    document.body.getBoundingClientRect(); // laid out, too
    performance.measure("move", { start: started });
  };
  answer = await loading;
  move();
  performance.measure("first", { start: 0 });
  if (refused) say(refused, true);
  const change = (id, does) => get(id).addEventListener("click", () => (does(), move(), keep()));
  get("both-buttons").hidden = false;
  change("hold", () => (held = now));
  change("release", () => (held = null));
  change("swap", () => {
    const other = held.asked;
    held = now;
    for (const [name, value] of Object.entries(other)) controls.get(name).write(value === null ? "" : String(value));
  });
  get("link").addEventListener("click", async () => {
    keep();
    const copied = await navigator.clipboard?.writeText(location.href).then(() => true, () => false);
    say(copied ? "The link is copied: it opens what is set here." : "Copy the address of this page: it opens what is set here.");
  });
  form.addEventListener("input", move);
  form.addEventListener("change", keep);
  form.addEventListener("submit", event => event.preventDefault());
  addEventListener("hashchange", () => {
    refused = recall();
    move();
    if (refused) say(refused, true);
  });
}

start().catch(error => say(`Python did not load: ${lastLine(error)}. Load the page again.`, true));
