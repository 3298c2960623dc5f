// Draws the model's plotly spec. plotly.js itself comes from the shared library model, once per page and version.

function plotly(library) {
  const pages = (window.lpkitPlotly ??= new Map());
  const version = library.get("version");
  if (!pages.has(version)) pages.set(version, unpack(library.get("packed")));
  return pages.get(version);
}

async function unpack(packed) {
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const source = await new Response(stream).text();
  const module = { exports: {} }; // shadows the loaders that a page may have
  new Function("module", "exports", "define", source).call(window, module, module.exports, undefined);
  return module.exports;
}

// The page's figures draw one after another, and after each redraw rest for as long as it took, painting included.
// plotly draws inside one task of the browser: without rests, figures of live runs on a slow machine fill the page's
// time, messages queue behind them, and an answer to a click comes minutes late.
function inTurn(work, rests) {
  const done = (window.lpkitTurn ?? Promise.resolve()).then(async () => {
    const started = performance.now();
    await work();
    return started;
  });
  const rest = async started => {
    await new Promise(painted => {
      requestAnimationFrame(() => setTimeout(painted));
      setTimeout(painted, 500); // a hidden page has no frames
    });
    await new Promise(rested => setTimeout(rested, performance.now() - started));
  };
  window.lpkitTurn = done.then(rests ? rest : () => {}).catch(() => {});
  return done;
}

// A figure is laid out for this many pixels at least. Where there are fewer, as on a phone, it is drawn smaller as a whole.
const LEAST = 520;

function fit(box, place) {
  const scale = Math.min(1, box.clientWidth / LEAST);
  place.style.width = scale < 1 ? `${LEAST}px` : "";
  place.style.transform = scale < 1 ? `scale(${scale})` : "";
  box.style.height = scale < 1 ? `${Math.ceil(place.offsetHeight * scale)}px` : "";
}

// Panels need this many pixels to stand side by side. In a narrower figure panels.js puts them below one another.
const SIDE_BY_SIDE = 600;
const isNarrow = box => 0 < box.clientWidth && box.clientWidth < SIDE_BY_SIDE;

async function render({ model, el }) {
  const part = name => model.widget_manager.get_model(model.get(name).replace("IPY_MODEL_", ""));
  const shown = await part("shown");
  const [title, box, place] = ["title", "box", "figure"].map(name => {
    const made = document.createElement("div");
    made.className = `lpkit-${name}`;
    return made;
  });
  place.style.minHeight = `${shown.get("spec").layout?.height ?? 360}px`; // the page does not jump when it is drawn
  el.style.width = "100%";
  el.classList.add("lpkit-room");
  el.append(title, box);
  box.append(place);
  const library = await part("library");
  const stacked = new Function(`${library.get("panels")}; return lpkitStacked`)();
  const Plotly = await plotly(library);

  let waits = false, gone = false, narrow = false;
  async function draw() { // of the specs that arrive while it waits for its turn only the last is drawn
    if (waits) return;
    waits = true;
    await inTurn(async () => {
      waits = false;
      if (gone) return;
      narrow = isNarrow(box);
      const spec = structuredClone(shown.get("spec")); // plotly writes into what it is given
      const { data, layout } = narrow ? stacked(spec) : spec;
      title.textContent = new DOMParser().parseFromString(layout.title?.text ?? "", "text/html").body.textContent;
      await Plotly.react(place, data, { ...layout, autosize: true }, model.get("config"));
      place.style.minHeight = "";
      place.dataset.drawn = Number(place.dataset.drawn ?? 0) + 1;
    }, place.dataset.drawn);
  }
  const resized = new ResizeObserver(() => {
    if (box.clientWidth) fit(box, place);
    if (place.dataset.drawn && box.clientWidth && narrow !== isNarrow(box)) draw();
    else if (place.dataset.drawn && place.offsetWidth) Plotly.Plots.resize(place);
  });
  shown.on("change:spec", draw);
  if (box.clientWidth) fit(box, place);
  await draw();
  place.on?.("plotly_click", ({ points: [{ curveNumber, x, y }] }) => {
    model.set("clicked", { curve: curveNumber, x, y });
    model.save_changes();
  });
  resized.observe(place);
  resized.observe(box);
  return () => {
    gone = true;
    shown.off("change:spec", draw);
    resized.disconnect();
    Plotly.purge(place);
  };
}

export default { render };
