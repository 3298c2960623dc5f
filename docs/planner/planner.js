// The page of the planner: controls as lpkit names them, Python to answer, and what it says as text and bars.
// What is measured: performance.measure "first" (from the navigation to the first answer) and "move" (from an input to its drawing).

import { loadPyodide } from "./pyodide/pyodide.mjs";

const here = name => new URL(name, import.meta.url).href;
const get = id => document.getElementById(id);
const made = (tag, props = {}, ...children) => {
  const element = Object.assign(document.createElement(tag), props);
  element.append(...children);
  return element;
};
const controls = new Map(); // by name: {read() -> value, write(text) -> whether it is one}
let answer; // Python's, once it is there

const lastLine = error => String(error).trim().split("\n").pop();

function say(words, error = false) {
  get("status").textContent = words;
  get("status").classList.toggle("error", error);
}

// ---- controls

function chooser({ name, label, options, value }) {
  const box = made("select", { id: name }, ...options.map(([key, text]) => made("option", { value: key, textContent: text })));
  box.value = value;
  const write = text => options.some(([key]) => key === text) && ((box.value = text), true);
  controls.set(name, { read: () => box.value, write });
  return made("div", { className: "control" }, made("label", { htmlFor: name, textContent: label }), box);
}

function number(name, value) {
  const box = made("input", { id: name, type: "number", min: 0, step: "any", inputMode: "decimal" });
  box.value = value ?? "";
  return box;
}

// What an address may hold: a finite number that is not below zero.
const plain = text => /^\d{1,16}(\.\d{1,12})?$/.test(text);

function slider({ name, label, steps, value }) {
  const nearest = x => steps.reduce((best, step, i) => (Math.abs(step - x) < Math.abs(steps[best] - x) ? i : best), 0);
  const box = number(name, value);
  const range = made("input", { type: "range", min: 0, max: steps.length - 1, step: 1, value: nearest(value), ariaLabel: label });
  const told = () => range.setAttribute("aria-valuetext", box.value);
  range.addEventListener("input", () => ((box.value = steps[range.value]), told()));
  box.addEventListener("input", () => ((range.value = nearest(Number(box.value))), told()));
  const write = text => plain(text) && ((box.value = text), (range.value = nearest(Number(text))), told(), true);
  told();
  controls.set(name, { read: () => (box.value === "" ? null : Number(box.value)), write });
  return made("div", { className: "control" }, made("label", { htmlFor: name, textContent: label }), range, box);
}

function optional({ name, label }) {
  const box = number(name, null);
  const write = text => (text === "" || plain(text)) && ((box.value = text), true);
  controls.set(name, { read: () => (box.value === "" ? null : Number(box.value)), write });
  return made("div", { className: "control short" }, made("label", { htmlFor: name, textContent: label }), box);
}

const kindOf = control => (control.options ? chooser : control.steps ? slider : optional)(control);
const asked = () => Object.fromEntries([...controls].map(([name, control]) => [name, control.read()]));

// ---- the address keeps what was set; what it holds is compared with the controls, and is never run

function keep() {
  const set = Object.entries(asked()).filter(([, value]) => value !== null);
  history.replaceState(null, "", `#${new URLSearchParams(set)}`);
}

function recall() {
  const refused = [];
  for (const [name, text] of new URLSearchParams(location.hash.slice(1))) {
    if (!controls.get(name)?.write(text)) refused.push(`${name}=${text}`.slice(0, 60));
  }
  return refused.length ? `The address holds what cannot be set here, and it is left out: ${refused.slice(0, 3).join(", ")}.` : "";
}

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

function draw(chart, said, colours) {
  const colourOf = name => colours[name] ?? colours[name.includes(":") ? ":" : ""];
  const most = Math.max(said.whole, said.limit);
  const [title, beside, rows] = chart.children;
  title.textContent = said.title;
  beside.textContent = said.beside;
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
  rows.replaceChildren(stack, ...said.rows.map(one => row(chart, one, said, colourOf(one.name))));
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
  draw(get("bytes"), said.bytes, colours.bytes);
  draw(get("seconds"), said.seconds, colours.seconds);
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
  let refused = recall();
  const move = () => {
    const started = performance.now();
    try {
      say("");
      show(JSON.parse(answer(JSON.stringify(asked()))), colours);
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
