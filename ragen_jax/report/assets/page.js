"use strict";
// Curves, scores and episodes of a report. Text of episodes goes into text nodes alone.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const { steps, runs, groups } = data;
  const alone = runs.length === 1;
  const COLOURS = 8;
  const state = { label: runs[0].labels.length > 1 ? "*" : "", step: null };
  const plots = []; // of all charts, to move together
  const byId = (id) => document.getElementById(id);

  function make(tag, props = {}, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(props)) {
      if (name in node) node[name] = value;
      else node.setAttribute(name, value);
    }
    node.append(...children);
    return node;
  }
  const choice = (words, entries, chosen, changed) => {
    const select = make("select", {}, ...entries.map(([value, text]) => make("option", { value, textContent: text })));
    select.value = String(chosen);
    select.addEventListener("change", () => changed(select.value));
    return make("label", {}, words, select);
  };
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  function shown(value) {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e5)) return value.toExponential(2);
    return String(Number(value.toPrecision(4)));
  }
  // rollout/success of an environment is rollout/LABEL/success; "*": of all together.
  const named = (key) => (state.label && state.label !== "*" ? key.replace("/", `/${state.label}/`) : key);
  const inLabel = (label) => label === null || state.label === "*" || label === state.label;

  // ------------------------------------------------------------------------- curves

  const WINDOW = 9; // number of values of a running mean
  function smoothed(values) { // centred; null where there is no value
    const at = values.flatMap((value, i) => (value === null ? [] : [i])), reach = (WINDOW - 1) / 2, found = values.map(() => null);
    at.forEach((i, k) => {
      const part = at.slice(Math.max(k - reach, 0), k + reach + 1);
      found[i] = part.reduce((sum, j) => sum + values[j], 0) / part.length;
    });
    return found;
  }

  // The lines of a chart: {key, name, colour, dash, values, half, faint}.
  function linesOf(chart) {
    const lines = [];
    const add = (columns, key, name, number, dash, faint, first = true) => {
      const values = columns[named(key)];
      if (!values || !values.some((value) => value !== null)) return;
      const half = faint || chart.logarithmic || (!alone && !first) ? null : columns[`${named(key)}_ci95`];
      const smooth = alone && chart.smooth.includes(key) && steps.length > WINDOW;
      const line = { key: named(key), name, number: number % COLOURS, dash, values, half, faint, first };
      if (!smooth) { lines.push(line); return; }
      lines.push({ ...line, values: smoothed(values), name: `${name}, mean of ${WINDOW} steps`, half: null, smooth: true });
      lines.push({ ...line, half: null, faint: true });
    };
    const names = chart.figures.map((key, i) => chart.names[i] || key);
    if (alone) {
      chart.figures.forEach((key, i) => add(runs[0].figures, key, names[i], i, false, false, i === 0));
      return lines;
    }
    const overlay = chart.overlay.length ? chart.overlay : chart.figures.slice(0, 2);
    groups.forEach((group, g) => {
      overlay.forEach((key, i) => {
        const name = names[chart.figures.indexOf(key)];
        const full = overlay.length > 1 ? `${group.name}: ${name}` : group.name;
        const averaged = group.runs.length > 1;
        add(averaged ? group.mean : runs[group.runs[0]].figures, key, full, g, i > 0, false, i === 0);
        if (averaged && i === 0) {
          group.runs.forEach((r) => add(runs[r].figures, key, runs[r].name, g, false, true));
        }
      });
    });
    return lines;
  }

  function lanes(lines, share) { // what uPlot draws: of each line its values, and its interval's two ends
    const series = [{}], columns = [steps], bands = [];
    for (const line of lines.toReversed()) { // the first line is drawn last, above the others
      const stroke = colour(`--s${line.number}`);
      const few = line.values.filter((value) => value !== null).length <= 45;
      line.at = series.length;
      series.push({
        stroke: line.faint ? stroke + "66" : stroke, width: line.faint ? 1 : line.first ? 2.6 : 1.4, spanGaps: true,
        dash: line.dash ? [5, 4] : undefined, points: { show: few && !line.faint, size: 4, fill: stroke },
      });
      columns.push(line.values);
      if (!line.half) continue;
      for (const sign of [1, -1]) {
        series.push({ stroke: "transparent", width: 0, spanGaps: true, points: { show: false } });
        const end = (value, i) => (share ? Math.min(Math.max(value + sign * line.half[i], 0), 1) : value + sign * line.half[i]);
        columns.push(line.values.map((value, i) => (value === null || line.half[i] === null ? null : end(value, i))));
      }
      bands.push({ series: [line.at + 1, line.at + 2], fill: stroke + (line.first ? "2e" : "16") });
    }
    return { series, columns, bands };
  }

  // Behind the lines: where the alarm was on, and the healthy band of one run.
  function behind(chart) {
    return (u) => {
      const { ctx } = u, { left, top, width, height } = u.bbox;
      ctx.save();
      ctx.beginPath(); ctx.rect(left, top, width, height); ctx.clip();
      if (alone) {
        ctx.fillStyle = colour("--bad-wash");
        for (const [label, spans] of Object.entries(runs[0].alarm)) {
          if (!inLabel(label)) continue;
          for (const [first, last] of spans) {
            const a = u.valToPos(first, "x", true), b = u.valToPos(last, "x", true);
            ctx.fillRect(a, top, Math.max(b - a, 2), height);
          }
        }
        const band = runs[0].bands[named(chart.band)];
        if (band) {
          const [low, high] = band.map((value) => u.valToPos(value, "y", true));
          ctx.strokeStyle = colour("--well"); ctx.lineWidth = devicePixelRatio; ctx.setLineDash([3 * devicePixelRatio, 4 * devicePixelRatio]);
          ctx.strokeRect(left - 5, high, width + 10, low - high);
          ctx.globalAlpha = 0.07; ctx.fillStyle = colour("--well"); ctx.fillRect(left, high, width, low - high);
        }
      }
      ctx.restore();
    };
  }
  const TINTS = { alarm: "--bad", first: "--s3", stop: "--bad" };
  function above(u) { // marks: alarm, first mover, stops; the step that was chosen
    const { ctx } = u, { top, height, left, width } = u.bbox;
    const line = (step, tint, dash) => {
      const x = u.valToPos(step, "x", true);
      if (x < left || x > left + width) return;
      ctx.strokeStyle = tint; ctx.setLineDash(dash); ctx.lineWidth = 1.4 * devicePixelRatio;
      ctx.beginPath(); ctx.moveTo(x, top); ctx.lineTo(x, top + height); ctx.stroke();
    };
    ctx.save();
    if (alone) for (const mark of runs[0].marks) {
      if (inLabel(mark.label)) line(mark.step, colour(TINTS[mark.kind] || "--s4"), mark.kind === "first" ? [4, 3] : []);
    }
    if (state.step !== null) line(state.step, colour("--soft"), [1, 3]);
    ctx.restore();
  }

  const WHOLE = [1, 2, 5].flatMap((n) => [0, 1, 2, 3, 4, 5].map((p) => n * 10 ** p)).sort((a, b) => a - b); // distances of steps on an axis
  let moving = false; // while one chart's zoom is handed to the others
  function handOn(u, key) {
    if (key !== "x" || moving) return;
    moving = true;
    const { min, max } = u.scales.x;
    for (const other of plots) if (other !== u) other.setScale("x", { min, max });
    moving = false;
  }

  function drawChart(chart, figure) {
    const lines = linesOf(chart);
    if (!lines.length) return false;
    if (steps.length === 1) { // a curve of one step would be a dot
      const table = tableOf(chart, lines);
      figure.append(table);
      table.open = true;
      return true;
    }
    const { series, columns, bands } = lanes(lines, chart.share);
    const place = make("div", { className: "plot", tabIndex: 0, role: "img" });
    place.setAttribute("aria-label", `${chart.title}. ${summary(lines)}. The table below has all values.`);
    const outputs = new Map();
    const legend = make("ul", { className: "legend" }, ...lines.filter((line) => !line.faint).map((line) => {
      const output = make("output", { textContent: shown(last(line.values)) });
      outputs.set(line, output);
      return make("li", { className: `s${line.number}` }, make("i", { className: line.dash ? "dash" : "" }), line.name, output);
    }));
    figure.append(place, legend, tableOf(chart, lines.filter((line) => !line.smooth)));
    const axis = { stroke: colour("--soft"), grid: { stroke: colour("--grid"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
    const options = {
      width: Math.max(place.clientWidth, 200), height: 210, padding: [8, 16, 0, 0], series, bands,
      legend: { show: false },
      scales: { x: { time: false, range: (_, min, max) => (min === max ? [min - 1, max + 1] : [min, max]) }, y: { distr: chart.logarithmic ? 3 : 1, ...(chart.share ? { range: [-0.02, 1.02] } : {}) } },
      axes: [{ ...axis, size: 30, space: 60, label: "step", labelSize: 18, labelGap: 0, labelFont: axis.font, incrs: WHOLE }, { ...axis, size: 52, label: chart.unit, labelSize: 18, labelGap: 0, labelFont: axis.font, values: (_, all) => all.map((value) => (value === null ? "" : shown(value))) }],
      cursor: { sync: { key: "run", scales: ["x", null] }, points: { size: 7 }, drag: { x: true, y: false }, focus: { prox: -1 } },
      hooks: {
        drawClear: [behind(chart)], draw: [above], setScale: [handOn],
        setCursor: [(u) => {
          for (const [line, output] of outputs) {
            output.textContent = reading(line.values, u.cursor.idx);
          }
        }],
      },
    };
    const u = new uPlot(options, columns, place);
    u.chartLines = lines;
    plots.push(u);
    let pressed = 0;
    u.over.addEventListener("mousedown", (event) => { pressed = event.clientX; });
    u.over.addEventListener("click", (event) => {
      if (Math.abs(event.clientX - pressed) < 4 && u.cursor.idx !== null) choose(steps[u.cursor.idx]);
    });
    place.addEventListener("keydown", (event) => byKey(event, u));
    new ResizeObserver(() => {
      if (place.clientWidth && place.clientWidth !== u.width) u.setSize({ width: place.clientWidth, height: 210 });
    }).observe(place);
    return true;
  }
  function reading(values, i) { // at the cursor, or at the last step before that has the figure
    if (i === null || i === undefined) return shown(last(values));
    const at = values.findLastIndex((value, k) => k <= i && value !== null);
    return at < 0 ? "–" : shown(values[at]) + (at < i ? ` (step ${steps[at]})` : "");
  }
  const last = (values) => values.findLast((value) => value !== null);
  function summary(lines) {
    return lines.filter((line) => !line.faint).map((line) => {
      const given = line.values.filter((value) => value !== null);
      return `${line.name}: ${shown(given[0])} initially, ${shown(given.at(-1))} finally, from ${shown(Math.min(...given))} to ${shown(Math.max(...given))}`;
    }).join("; ");
  }
  let cursor = 0;
  function byKey(event, u) {
    const far = event.shiftKey ? 10 : 1;
    const to = { ArrowLeft: cursor - far, ArrowRight: cursor + far, Home: 0, End: steps.length - 1 }[event.key];
    if (event.key === "Enter") { choose(steps[cursor]); return; }
    if (to === undefined) return;
    event.preventDefault();
    cursor = Math.min(Math.max(to, 0), steps.length - 1);
    for (const other of plots) other.setCursor({ left: other.valToPos(steps[cursor], "x"), top: 8 });
    byId("live").textContent = `step ${steps[cursor]}: ` + u.chartLines.filter((line) => !line.faint)
      .map((line) => `${line.name} ${reading(line.values, cursor)}`).join(", ");
  }

  function plusMinus(value, half, share) {
    if (value === null || half === null || half === undefined) return "";
    const bounded = !share || half < Math.max(value, 1 - value) - 1e-6;
    return bounded ? ` ± ${shown(half)}` : " (interval 0 to 1)";
  }

  function tableOf(chart, lines) {
    const { title, share } = chart;
    const details = make("details", {}, make("summary", { textContent: "Table" }));
    details.addEventListener("toggle", () => {
      if (!details.open || details.children.length > 1) return;
      const head = make("tr", {}, make("th", { scope: "col", textContent: "step" }), ...lines.map((line) => make("th", { scope: "col", textContent: line.name })));
      const body = make("tbody");
      steps.forEach((step, i) => {
        if (lines.every((line) => line.values[i] === null)) return;
        body.append(make("tr", {}, make("th", { scope: "row", textContent: step }), ...lines.map((line) => {
          const cell = make("td", { textContent: shown(line.values[i]) + plusMinus(line.values[i], line.half && line.half[i], share) });
          if (line.values[i] !== null) { cell.dataset.figure = line.key; cell.dataset.step = step; cell.dataset.value = line.values[i]; }
          return cell;
        })));
      });
      const scroll = make("div", { className: "scroll", tabIndex: 0, role: "region" }, make("table", {}, make("caption", { textContent: title }), make("thead", {}, head), body));
      scroll.setAttribute("aria-label", `${title}, all values`);
      details.append(scroll);
    });
    return details;
  }

  let free = "";
  function drawCharts() {
    for (const u of plots.splice(0)) u.destroy();
    const place = byId("charts"), absent = [];
    place.replaceChildren();
    for (const chart of data.charts) {
      const figure = make("figure", { className: "chart" }, make("figcaption", {}, make("h3", { textContent: chart.title }), make("p", { textContent: chart.words })));
      place.append(figure);
      if (!drawChart(chart, figure)) { figure.remove(); absent.push(chart.title); }
    }
    byId("absent").textContent = absent.length ? `Not measured in ${alone ? "this run" : "these runs"}: ${absent.join("; ")}.` : "";
    const keys = [...new Set(runs.flatMap((run) => Object.keys(run.figures)))].filter((key) => !key.endsWith("_ci95")).sort();
    if (!keys.includes(free)) free = keys.find((key) => key === "rollout/return") || keys[0];
    const figure = make("figure", { className: "chart" });
    place.append(figure);
    const label = state.label;
    state.label = ""; // the list has the figures of environments under their own names
    figure.append(make("figcaption", {}, make("h3", { textContent: "Any metric" }), choice("", keys.map((key) => [key, key]), free, (key) => { free = key; drawCharts(); byId("charts").lastElementChild.querySelector("select").focus(); })));
    figure.querySelector("select").setAttribute("aria-label", "metric of the last chart");
    drawChart({ title: free, figures: [free], names: [free], overlay: [free], band: "", logarithmic: false, share: false, unit: "", smooth: [] }, figure);
    state.label = label;
  }

  function timelineBar() {
    const bar = byId("timeline-bar");
    if (runs[0].labels.length > 1) {
      bar.append(choice("Environment", [["*", "all"], ...runs[0].labels.map((label) => [label, label])], state.label, (label) => { state.label = label; drawCharts(); }));
    }
    bar.append(make("button", { type: "button", textContent: "Whole run", onclick: () => { for (const u of plots) u.setScale("x", { min: steps[0], max: steps.at(-1) }); } }));
    const marks = alone ? runs[0].marks : [];
    byId("marks").textContent = marks.length ? "Marked: " + marks.map((mark) => `step ${mark.step}: ${mark.label ? mark.label + ", " : ""}${mark.words}`).join("; ") + "." : "";
  }

  function choose(step) {
    state.step = step;
    for (const u of plots) u.redraw(false);
    showMatrix(nearest(data.matrices, step));
    const saved = nearest(data.episodes, step);
    if (saved) { filters.step = String(saved.step); drawFilters(); listEpisodes(); }
    byId("live").textContent = `step ${step} chosen`;
  }
  const nearest = (items, step) => items.reduce((best, item) => (best && Math.abs(best.step - step) <= Math.abs(item.step - step) ? best : item), null);

  // ------------------------------------------------------------------------- scores

  const named2 = (item) => [alone ? "" : runs[item.run].name, item.label, `step ${item.step}`].filter(Boolean).join(", ");
  function showMatrix(matrix) {
    const place = byId("matrix-body");
    if (!matrix) {
      place.replaceChildren(make("p", { className: "hint", textContent: "No score matrix is stored. Runs store one every diagnose.scores_every steps in diagnostics/; runs of older versions have none." }));
      return;
    }
    const { values, own } = matrix, rows = values.length, cols = values[0].length;
    const sizes = data.matrices.flatMap((m) => m.values.flat().map(Math.abs)).sort((a, b) => a - b);
    const top = Math.max(sizes[Math.floor(0.98 * (sizes.length - 1))], 0.01); // of all steps: pictures can be compared
    const canvas = make("canvas", { width: cols * 24, height: rows * 8, role: "img" });
    const best = values.filter((row, m) => row[own[m]] === Math.max(...row)).length;
    canvas.setAttribute("aria-label", `${rows} reasonings under ${cols} prompts; own prompt most likely in ${best}`);
    const ctx = canvas.getContext("2d");
    ctx.fillStyle = colour("--card"); ctx.fillRect(0, 0, canvas.width, canvas.height);
    values.forEach((row, m) => row.forEach((value, n) => {
      ctx.fillStyle = `rgba(${colour(value > 0 ? "--high" : "--low")}, ${Math.min(Math.abs(value) / top, 1)})`;
      ctx.fillRect(n * 24, m * 8, 24, 8);
      if (n === own[m]) { ctx.fillStyle = colour("--ink"); ctx.fillRect(n * 24 + 1, m * 8 + 2, 3, 4); }
    }));
    const bar = make("div", { className: "bar" }, choice("Stored", data.matrices.map((m, i) => [i, named2(m)]), data.matrices.indexOf(matrix), (i) => { showMatrix(data.matrices[i]); byId("matrix-body").querySelector("select").focus(); }));
    const table = make("details", {}, make("summary", { textContent: "Table" }));
    table.addEventListener("toggle", () => {
      if (!table.open || table.children.length > 1) return;
      const head = make("tr", {}, make("th", { scope: "col", textContent: "reasoning" }), ...values[0].map((_, n) => make("th", { scope: "col", textContent: `prompt ${n}` })));
      const body = make("tbody", {}, ...values.map((row, m) => make("tr", {}, make("th", { scope: "row", textContent: `${m}, of prompt ${own[m]}` }), ...row.map((value) => make("td", { textContent: value })))));
      table.append(make("div", { className: "scroll", tabIndex: 0, role: "region", ariaLabel: "score matrix" }, make("table", {}, make("caption", { textContent: "Log-probability per token, minus the row's mean" }), make("thead", {}, head), body)));
    });
    place.replaceChildren(bar, make("div", { className: "matrix" },
      make("div", {}, make("p", { className: "axis", textContent: "prompts →   reasonings ↓ (sorted by their own prompt, which is marked)" }), canvas),
      make("div", {},
        make("p", { className: "figure", textContent: `${best} of ${rows}` }),
        make("p", { className: "hint", textContent: `samples of reasoning are most likely under their own prompt; chance is ${shown(rows / cols)}.` }),
        make("div", { className: "key" }), make("div", { className: "ends" }, make("span", { textContent: shown(-top) }), make("span", { textContent: "0 nats per token" }), make("span", { textContent: `+${shown(top)}` })),
        make("p", { className: "hint", textContent: "Log-probability per token of the reasoning under a prompt, minus the mean over the prompts; one scale for all steps. If reasoning depends on its prompt, the marked cells are blue and the others are not. After template collapse rows are blank: every prompt explains the reasoning equally well." }), table)));
  }

  // ------------------------------------------------------------------------- episodes

  data.episodes.sort((a, b) => b.step - a.step || b.heldout - a.heldout); // newest first
  const filters = { run: "*", label: "*", played: "*", step: "*", success: "*", kept: "*", alarm: "*" };
  let shade = true, current = null;
  const alarmStart = (episode) => {
    const spans = runs[episode.run].alarm[episode.label] || [];
    return spans.length ? spans[0][0] : Infinity;
  };
  const TESTS = {
    run: (e, value) => e.run === Number(value), label: (e, value) => e.label === value, step: (e, value) => e.step === Number(value),
    played: (e, value) => String(e.heldout) === value,
    success: (e, value) => String(e.success) === value, kept: (e, value) => String(e.kept) === value,
    alarm: (e, value) => (e.step >= alarmStart(e) ? "after" : "before") === value,
  };
  const matching = () => data.episodes.filter((e) => Object.entries(filters).every(([name, value]) => value === "*" || TESTS[name](e, value)));

  function drawFilters() {
    const bar = byId("episode-bar"), any = ["*", "any"];
    const put = (name, words, entries) => {
      const field = choice(words, [any, ...entries], filters[name], (value) => { filters[name] = value; listEpisodes(); });
      field.querySelector("select").id = `filter-${name}`;
      return field;
    };
    const all = (pick) => [...new Set(data.episodes.map(pick))];
    const fields = [];
    if (!alone) fields.push(put("run", "Run", runs.map((run, i) => [i, run.name])));
    if (runs[0].labels.length > 1) fields.push(put("label", "Environment", all((e) => e.label).map((label) => [label, label])));
    fields.push(put("step", "Step", all((e) => e.step).sort((a, b) => b - a).map((step) => [step, step])));
    if (new Set(data.episodes.map((e) => e.heldout)).size > 1) fields.push(put("played", "Played in", [["true", "evaluation"], ["false", "training"]]));
    fields.push(put("success", "Success", [["true", "solved"], ["false", "not solved"]]));
    if (data.episodes.some((e) => e.kept !== null)) fields.push(put("kept", "Used for training", [["true", "kept"], ["false", "dropped"]]));
    if (data.episodes.some((e) => alarmStart(e) < Infinity)) fields.push(put("alarm", "Alarm", [["before", "before it"], ["after", "since it"]]));
    if (data.episodes.some((e) => e.turns.some((turn) => turn.logps))) {
      const box = make("input", { type: "checkbox", checked: shade, onchange: () => { shade = box.checked; showEpisode(current); } });
      fields.push(make("label", {}, box, "shade unlikely tokens"));
    }
    bar.replaceChildren(...fields);
  }
  // What other trainers' rollouts do not say is null.
  const result = (episode) => episode.success === null ? make("span", { textContent: "success not said" }) : make("span", { className: episode.success ? "yes" : "no", textContent: episode.success ? "solved" : "not solved" });
  const total = (episode) => episode.return === null ? "not said" : shown(episode.return);
  function listEpisodes() {
    const found = matching(), list = byId("episode-list");
    byId("episode-count").textContent = `${found.length} of the page's ${data.episodes.length} episodes` + (data.saved > data.episodes.length ? `, a sample of the ${data.saved} in ${data.place}, equally many of each saved step.` : `, which are all in ${data.place}.`);
    list.replaceChildren(...found.map((episode) => {
      const button = make("button", { type: "button", onclick: () => showEpisode(episode) },
        result(episode), ` · return ${total(episode)}`,
        make("small", { textContent: `${named2(episode)} · group ${episode.group}, member ${episode.member}${episode.heldout ? " · held out" : episode.kept === false ? " · dropped" : ""}` }));
      button.episode = episode;
      return make("li", {}, button);
    }));
    showEpisode(found.includes(current) ? current : found[0] || null);
  }
  function showEpisode(episode) {
    current = episode;
    for (const button of byId("episode-list").querySelectorAll("button")) {
      if (button.episode === episode) button.setAttribute("aria-current", "true"); else button.removeAttribute("aria-current");
    }
    const place = byId("episode");
    if (!episode) { place.replaceChildren(make("p", { textContent: "No episode passes these filters." })); return; }
    const [oldest, newest] = sameProblem(episode);
    if (compare && oldest !== newest) {
      place.replaceChildren(compareButton(episode), make("div", { className: "two" }, ...[oldest, newest].map((each) => make("div", {}, ...parts(each)))));
      return;
    }
    place.replaceChildren(...(oldest === newest ? [] : [compareButton(episode)]), ...parts(episode));
  }
  let compare = false;
  function sameProblem(episode) { // its first and its last episode on the page, of the same member
    const same = data.episodes.filter((e) => episode.seed !== null && ["run", "label", "heldout", "seed", "member"].every((name) => e[name] === episode[name]));
    return [same.at(-1) || episode, same[0] || episode];
  }
  function compareButton(episode) {
    const [oldest, newest] = sameProblem(episode);
    const words = compare ? "Show one episode" : `Compare this problem at steps ${oldest.step} and ${newest.step}`;
    return make("button", { type: "button", id: "compare", textContent: words, onclick: () => { compare = !compare; showEpisode(episode); byId("compare").focus(); } });
  }
  function parts(episode) {
    const kept = episode.heldout ? "held out: not learnt from" : episode.kept === null ? "whether it was learnt from is not recorded" : episode.kept ? "kept: learnt from" : "dropped by the filter";
    return [
      make("h3", { textContent: `${named2(episode)}${episode.seed === null ? "" : `, seed ${episode.seed}`}, group ${episode.group}, member ${episode.member}` }),
      make("p", { className: "hint" }, make("b", {}, result(episode)), ` · return ${total(episode)} · ${kept}`),
      ...episode.turns.map(showTurn)];
  }
  function showTurn(turn, i) {
    const text = turn.reply.join(""), [think, answer] = turn.tags ? turn.tags.map((token) => (token < 0 ? -1 : turn.reply.slice(0, token).join("").length)) : [text.indexOf("</think>"), text.indexOf("<answer>")];
    const mid = think < 0 ? text.length : think;
    const said = [`Turn ${i + 1}`];
    if (turn.valid !== null) said.push(make("span", { className: turn.valid ? "yes" : "no", textContent: turn.valid ? "valid" : "not valid" }));
    if (turn.reward !== null) said.push(`reward ${shown(turn.reward)}`);
    if (turn.actions !== null) said.push(turn.actions.length ? `did ${turn.actions.join(", ")}` : "did nothing");
    const parts = [[think < 0 ? "reasoning, never closed" : "reasoning", 0, mid], [answer < 0 ? "no answer" : "answer", mid, text.length]];
    const reply = parts.filter(([, from, to]) => to > from).flatMap(([words, from, to]) => [make("p", { className: "part", textContent: words }), tokens(turn, from, to)]);
    return make("div", { className: "turn" },
      make("h4", {}, ...said.flatMap((word, n) => (n ? [" · ", word] : [word]))),
      make("div", { className: "two" },
        make("div", {}, make("p", { className: "part", textContent: "prompt" }), ...images(turn), make("pre", { textContent: turn.prompt, tabIndex: 0 })), make("div", {}, ...reply)));
  }
  function images(turn) { // of the turn's own message; null: the file is gone or damaged
    return (turn.images || []).map((src, i) => (src ? make("img", { src, alt: `image ${i + 1} of the prompt` }) : make("p", { className: "hint", textContent: `image ${i + 1} of the prompt cannot be read` })));
  }
  function tokens(turn, from, to) {
    const pre = make("pre", { tabIndex: 0 });
    let at = 0;
    turn.reply.forEach((piece, i) => {
      const start = at;
      at += piece.length;
      if (start < from || start >= to) return;
      const logp = turn.logps ? turn.logps[i] : null, classes = [];
      if (/^<.*>$/.test(piece)) classes.push("tag");
      if (logp !== null && shade) classes.push(`p${Math.min(Math.floor(-logp / 0.7 + 0.5), 5)}`);
      pre.append(make("span", { className: classes.join(" "), textContent: piece, title: logp === null ? "" : `probability ${shown(Math.exp(logp))}, log-probability ${shown(logp)}` }));
    });
    return pre;
  }
  function episodes() {
    const place = byId("episodes-body");
    if (!data.episodes.length) { place.append(make("p", { className: "hint", textContent: "None is saved in this run's folder (rollout.save_every)." })); return; }
    place.append(make("div", { className: "bar", id: "episode-bar" }), make("p", { className: "hint", id: "episode-count", role: "status" }),
      make("div", { className: "browser" }, make("ul", { className: "list", id: "episode-list" }), make("div", { className: "episode", id: "episode" })));
    if (data.episodes.some((e) => e.turns.some((turn) => turn.logps))) {
      byId("episode-count").after(make("p", { className: "hint", textContent: "The stronger a token is coloured, the less likely it was when it was sampled; hover for its probability." }));
    }
    drawFilters();
    listEpisodes();
  }

  timelineBar();
  drawCharts();
  showMatrix(data.matrices.at(-1) || null);
  episodes();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { drawCharts(); showMatrix(data.matrices.at(-1) || null); });
})();
