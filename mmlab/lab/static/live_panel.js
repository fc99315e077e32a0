// The page's half of mmlab/lab/live_panel.py. A Store keeps every row that the kernel sent, one for each model; a View
// draws it into live_panel.html.

const RUN_DASHES = [[], [7, 3], [2, 2.5], [9, 3, 2, 3], [4, 2], [1, 3], [12, 3], [6, 2, 1, 2, 1, 2]];
const MEASURE_DASHES = [[], [6, 3], [1.5, 2.5], [9, 3, 2, 3], [3, 5], [12, 4]];
const AXES = { sample: "sample", step: "step", training: "training second", second: "second", token: "padded token" };
const AMOUNTS = { sample: (c, i) => c.num_samples[i], training: (c, i) => c.step_s[i], token: (c, i) => c.padded_tokens[i] + c.padded_patches[i] }; // of a step

const ACK_EVERY = 25, ACK_MS = 2700; // messages, or time, between acknowledgements; each costs the kernel 2 ms
const SILENT_MS = 5000; // without a message from the kernel for so long, it is called busy
const NUDGE_MS = 2500; // before that, ask whether it is there
const LEFT = 52, RIGHT = 8, TOP = 6, BOTTOM = 18; // margins of a plot's area, CSS pixels
const FONT = "px system-ui, sans-serif";

// robust: a few outliers do not set the range, and may be drawn on a log scale.
// from: [track, column] of the measure, or several, of which the first with numbers is used;
// or ratio: two columns of steps, whose sums are divided where several steps are averaged.
// sharp: never smoothed, because its maximum matters. learnt: steps without learning are marked, and not part of the line.
const PLOTS = [
	{ id: "loss", title: "loss", robust: true, measures: [
		{ id: "loss", label: "training", from: [["step", "loss"]] },
		{ id: "held_out", label: "held out", marks: true, from: [["eval", "loss"]] }] },
	{ id: "speed", title: "samples/s", zero: true, robust: true, measures: [{ id: "speed", label: "samples/s", ratio: ["num_samples", "step_s"], learnt: true }] },
	{ id: "memory", title: "memory", zero: true, unit: "bytes", measures: [
		{ id: "peak", label: "peak", source: "peak_source", sharp: true, from: [["step", "peak_bytes"]] },
		{ id: "predicted", label: "predicted", sharp: true, from: [["step", "predicted_bytes"]] },
		{ id: "in_use", label: "in use", source: "memory_source", from: [["device", "memory_bytes"]] },
		{ id: "allocated", label: "allocated", from: [["device", "allocated_bytes"], ["step", "allocated_bytes"]] },
		{ id: "reserved", label: "reserved", from: [["device", "reserved_bytes"], ["step", "reserved_bytes"]] },
		{ id: "limit", label: "limit", soft: true, from: [["step", "limit_bytes"], ["device", "memory_total_bytes"]] }] },
	{ id: "waste", title: "padding waste", unit: "share", measures: [{ id: "waste", label: "measured", from: [["step", "combined_waste"]] }] },
	{ id: "use", title: "utilisation", unit: "share", measures: [{ id: "use", label: "busy", source: "utilization_source", from: [["device", "utilization_ratio"]] }] },
	{ id: "wait", title: "waiting for data", unit: "share", measures: [{ id: "wait", label: "waiting", ratio: ["data_wait_s", "step_s"] }] },
	{ id: "samples", title: "samples per step", zero: true, measures: [{ id: "samples", label: "samples", from: [["step", "num_samples"]] }] },
	{ id: "batch", title: "padded tokens per step", zero: true, measures: [
		{ id: "image", label: "image", from: [["step", "padded_patches"]] },
		{ id: "text", label: "text", from: [["step", "padded_tokens"]] }] },
];

/* ---- data ---- */

// Columns that grow; capacity doubles.
class Series {
	constructor(keys) { this.keys = keys; this.n = 0; this.room = 0; this.columns = {}; this.finite = {}; this.sorted = true; }
	write(start, n, data, at) {
		const end = start + n;
		if (end > this.room) {
			this.room = Math.max(1024, 2 ** Math.ceil(Math.log2(end)));
			for (const key of this.keys) {
				const column = new Float32Array(this.room);
				if (this.columns[key]) column.set(this.columns[key].subarray(0, this.n));
				this.columns[key] = column;
			}
		}
		this.keys.forEach((key, k) => {
			const part = data.subarray(at + k * n, at + (k + 1) * n);
			this.columns[key].set(part, start);
			if (!this.finite[key]) this.finite[key] = part.some(Number.isFinite);
		});
		const steps = this.columns.step;
		if (steps) for (let i = Math.max(1, start); i < end; i++) if (steps[i] < steps[i - 1]) this.sorted = false;
		this.n = Math.max(this.n, end);
	}
}

// A growing array computed from others, row by row: the first `done` rows are final.
class Derived {
	constructor(Type, f) { this.Type = Type; this.f = f; this.done = 0; this.array = new Type(1024); }
	upTo(n) {
		if (n > this.array.length) {
			const wider = new this.Type(2 ** Math.ceil(Math.log2(n)));
			wider.set(this.array.subarray(0, this.done));
			this.array = wider;
		}
		for (let i = this.done; i < n; i++) this.array[i] = this.f(i, this.array);
		this.done = Math.max(this.done, n);
		return this.array;
	}
}

class Line { // one run on one rank
	constructor(store, run, rank) {
		Object.assign(this, { store, run, rank, key: `${run.id}.${rank}`, derived: new Map(), several: false });
	}
	get label() { return this.several ? `${this.run.name} · rank ${this.rank}` : this.run.name; }
	series(track) { return this.store.series.get(`${this.key}.${track}`); }
	derive(name, Type, f) {
		let found = this.derived.get(name);
		if (!found) this.derived.set(name, (found = new Derived(Type, f)));
		return found;
	}
	// x of each row of a track on an axis: { array, sorted }
	x(track, axis) {
		const series = this.series(track), step = this.series("step");
		if (axis === "second") return { array: series.columns.time_s, sorted: true };
		if (axis === "step" && series.columns.step) return { array: series.columns.step, sorted: series.sorted };
		if (track === "step") {
			const c = series.columns;
			const all = this.derive("x" + axis, Float64Array, null);
			all.f = (i, array) => {
				let last = i - 1; // skip repeated steps
				while (c.step[last] >= c.step[i]) last--;
				return (array[last] ?? 0) + (AMOUNTS[axis]?.(c, i) || 0);
			};
			return { array: all.upTo(series.n), sorted: series.sorted };
		}
		// Rows without a step: by their time, between two steps.
		const all = this.derive(`x${track}${axis}`, Float64Array, null);
		if (!step || !step.n) { all.f = () => 0; all.done = 0; return { array: all.upTo(series.n), sorted: true }; }
		const times = step.columns.time_s, along = this.x("step", axis), last = step.n - 1;
		all.f = (i) => {
			const t = series.columns.time_s[i], after = firstAtLeast(times, step.n, t);
			if (after > last) return along.array[last];
			if (after === 0) return axis === "step" ? Math.max(0, along.array[0] - 1) : 0;
			const share = (t - times[after - 1]) / (times[after] - times[after - 1] || 1);
			return along.array[after - 1] + share * (along.array[after] - along.array[after - 1]);
		};
		const array = all.upTo(series.n);
		all.done = firstAtLeast(series.columns.time_s, series.n, times[last]); // later rows move when the next step comes
		return { array, sorted: along.sorted };
	}
	// { track, n, values } of a measure, or null where nothing was measured
	values(measure) {
		if (!measure.from) {
			const series = this.series("step"), [over, under] = measure.ratio;
			if (!series?.finite[over]) return null;
			const all = this.derive("m" + measure.id, Float32Array, null), c = series.columns;
			all.f = (i) => c[over][i] / c[under][i];
			return { track: "step", n: series.n, values: all.upTo(series.n) };
		}
		for (const [track, key] of measure.from) {
			const series = this.series(track);
			if (series?.finite[key]) return { track, n: series.n, values: series.columns[key] };
		}
		return null;
	}
	// First and last row of a track for which a pause lies between it and the row before.
	pauses(track) {
		const { columns, n } = this.series(track), first = (s) => firstAtLeast(columns.time_s, n, s * (1 + 1e-6) + 1e-4);
		return this.run.pauses.map(([from, to]) => [first(from), first(to ?? Infinity)]);
	}
	isPaused(track) {
		const pauses = this.pauses(track);
		return pauses.length ? (i) => pauses.some(([first, last]) => i >= first && i <= last) : null;
	}
	// Whether a line ends before row i: at a pause; on the axis of seconds also at an evaluation or another's turn.
	isCut(track, axis) {
		const { columns, n } = this.series(track), times = columns.time_s, usual = (times[n - 1] - times[0]) / n, paused = this.isPaused(track);
		const last = columns.step_s ? (i) => columns.step_s[i] : () => usual;
		return axis !== "second" ? paused : (i) => paused?.(i) || times[i] - times[i - 1] > 3 * last(i) + 0.5;
	}
	// Seconds in which it trained, without pauses and others' turns.
	turns() {
		const { n, columns: { time_s, step_s } } = this.series("step"), cut = this.isCut("step", "second"), spans = [];
		for (let i = 0; i < n; i++) {
			if (!i || cut(i)) spans.push([time_s[i] - (step_s[i] || 0), 0]);
			spans.at(-1)[1] = time_s[i];
		}
		return spans;
	}
	teaches(i) { const { columns, finite } = this.series("step"); return !finite.loss || !Number.isNaN(columns.loss[i]); }
	// Exponential mean, without bias at the start; gaps stay gaps.
	smoothed(measure, found, weight) {
		if (!weight || measure.marks || measure.soft || measure.sharp) return found.values;
		const name = `s${measure.id}`;
		let all = this.derived.get(name);
		if (!all || all.weight !== weight || all.track !== found.track) {
			all = new Derived(Float32Array, null);
			Object.assign(all, { weight, track: found.track, sum: 0, norm: 0 });
			this.derived.set(name, all);
		}
		const paused = this.isPaused(found.track), raw = found.values, c = this.series(found.track).columns, [over, under] = (measure.ratio ?? []).map((key) => c[key]);
		all.f = (i) => {
			if (paused?.(i)) all.sum = all.norm = 0;
			if (!Number.isFinite(raw[i])) return NaN;
			all.sum = all.sum * weight + (over ?? raw)[i] * (1 - weight);
			all.norm = all.norm * weight + (under?.[i] ?? 1) * (1 - weight);
			return all.sum / all.norm;
		};
		return all.upTo(found.n);
	}
}

function firstAtLeast(array, n, value) {
	let low = 0, high = n;
	while (low < high) { const middle = (low + high) >> 1; if (array[middle] < value) low = middle + 1; else high = middle; }
	return low;
}

class Store {
	constructor(model) {
		Object.assign(this, { model, views: new Set(), series: new Map(), lines: [], runs: [], notes: [], errors: [], tiles: [], verdict: "", phase: "waiting …", lost: false, busy: false });
		Object.assign(this, { state: "waiting", progress: [null, null], seq: 0, acked: 0, last_s: null, heard: 0, nudged: 0, points: 0, untold: [] });
		this.tracks = model.get("tracks");
		this.listen = (message, buffers) => this.take(message, buffers);
		this.part = () => { this.lost = true; this.schedule(); };
		model.on("msg:custom", this.listen);
		model.on("comm_live_update", this.part); // the kernel was restarted, unless it sends a message
		this.timer = setInterval(() => this.watch(), 500);
		this.born = Date.now();
	}
	get shownState() { return this.lost ? "lost" : this.busy ? "busy" : this.state; }
	close() { clearInterval(this.timer); this.model.off("msg:custom", this.listen); this.model.off("comm_live_update", this.part); }
	send(message) { try { this.model.send(message); } catch (error) { console.debug("mmlab panel: no kernel", error); } }
	tell(...messages) { this.untold.push(...messages); if (this.hears) for (const each of this.untold.splice(0)) this.send(each); }
	ready() {
		const have = {};
		for (const [name, series] of this.series) have[name] = series.n;
		this.nudged = Date.now();
		this.send({ kind: "ready", have });
	}
	attach(view) { this.views.add(view); this.ready(); this.schedule(); }
	detach(view) {
		this.views.delete(view);
		if (this.views.size) return;
		if (!this.lost && !this.busy) this.series.clear(), this.lines = [];
		this.send({ kind: "hidden" });
	}
	take(message, buffers) {
		const { rows, runs, seq, ...facts } = message, bytes = buffers?.[0];
		if (facts.kind !== "update") return;
		Object.assign(this, facts, { heard: Date.now(), lost: false, busy: false, seq: Math.max(this.seq, seq) });
		this.tell(); // what was sent before the page got its subshell waits behind the running cell: ask again
		if (!this.hears && this.views.size && this.heard - this.nudged > 500 + this.nudged - this.born) this.ready();
		if (runs) this.setRuns(runs);
		if (bytes && rows.length) {
			const data = new Float32Array(bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.byteLength));
			let at = 0, gap = false;
			for (const [name, start, n] of rows) {
				const keys = this.tracks[name.split(".")[2]];
				let series = this.series.get(name);
				if (!series) this.series.set(name, (series = new Series(keys)));
				if (start > series.n) gap = true; // something was missed: ask for it
				else series.write(start, n, data, at);
				at += n * keys.length;
			}
			if (gap) this.ready();
		}
		this.points = 0; // those of earlier runs do not count
		for (const line of this.lines) this.points += line.run.ghost ? 0 : line.series("step")?.n ?? 0;
		this.schedule();
	}
	setRuns(runs) {
		const old = new Map(this.lines.map((line) => [line.key, line]));
		this.runs = runs;
		this.lines = runs.flatMap((run) => (run.ranks.length ? run.ranks : [0]).map((rank) => {
			const line = old.get(`${run.id}.${rank}`) ?? new Line(this, run, rank);
			return Object.assign(line, { run, several: run.ranks.length > 1 });
		}));
		const ids = new Set(runs.map((run) => run.id));
		for (const name of this.series.keys()) if (!ids.has(name.split(".")[0])) this.series.delete(name);
	}
	watch() {
		if (!this.views.size) return this.heard && !this.nudged++ && this.send({ kind: "unseen" }); // its cell ran anew
		for (const view of this.views) if (view.drawnWith !== view.colours()) this.schedule(); // a theme's sheet may come late
		const quiet = Date.now() - (this.heard || this.born);
		if (quiet > NUDGE_MS && Date.now() - this.nudged > NUDGE_MS) this.ready(); // another page's leaving may have hushed it
		if (quiet > SILENT_MS && !this.busy) { this.busy = true; this.schedule(); }
	}
	schedule() {
		if (this.frame) return;
		this.frame = requestAnimationFrame(() => {
			this.frame = 0;
			for (const view of this.views) view.draw();
			if (this.views.size && (this.more || this.seq - this.acked >= ACK_EVERY)) this.ack();
			else if (this.seq > this.acked && !this.later) this.later = setTimeout(() => this.ack(), ACK_MS);
		});
	}
	ack() {
		clearTimeout(this.later);
		this.later = 0;
		if (!this.views.size || this.seq === this.acked || this.frame) return; // a frame that is due answers itself
		this.acked = this.seq;
		this.send({ kind: "ack", seq: this.seq });
	}
}

/* ---- numbers and times in words ---- */

const UNITS = [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]];
function number(value, digits = 4, size = Math.abs(value)) { // size: of the largest number beside it
	if (!value || !Number.isFinite(value)) return value === undefined ? "–" : String(value);
	if (size >= 1e9) return +(value / 1e9).toPrecision(digits) + " G";
	if (size >= 1e6) return +(value / 1e6).toPrecision(digits) + " M";
	if (size >= 1e5) return +(value / 1e3).toPrecision(digits) + " k";
	return String(+value.toPrecision(digits));
}
function inUnit(value, unit) {
	if (unit === "share") return Number.isFinite(value) ? (100 * value).toFixed(1) + " %" : number(value);
	if (unit !== "bytes" || !Number.isFinite(value)) return number(value);
	const [size, name] = UNITS.find(([bytes]) => value >= bytes) ?? [1, "B"];
	return +(value / size).toPrecision(3) + " " + name;
}
function niceStep(span, most) {
	const rough = span / most, power = 10 ** Math.floor(Math.log10(rough));
	return [1, 2, 2.5, 5, 10].map((k) => k * power).find((step) => step >= rough) ?? rough;
}
function ticks(low, high, most, unit) {
	const scale = unit === "bytes" ? (UNITS.find(([bytes]) => high >= bytes) ?? [1])[0] : 1;
	const step = scale * niceStep((high - low) / scale || 1, most), found = [];
	for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-6; k++) found.push(k * step);
	return found;
}
function logTicks(low, high) {
	const found = [], wide = high / low > 50 ? [1] : [1, 2, 5];
	for (let power = 10 ** Math.floor(Math.log10(low)); power <= high; power *= 10) found.push(...wide.map((k) => k * power).filter((y) => y >= low && y <= high));
	return found.length > 1 ? found : ticks(low, high, 3);
}
function duration(s) {
	if (!Number.isFinite(s)) return "";
	const whole = Math.round(s);
	if (whole < 60) return `${whole} s`;
	if (whole < 5400) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
	return `${(s / 3600).toFixed(1)} h`;
}
const clock = (ms) => new Date(ms).toLocaleString("sv").slice(Date.now() - ms > 7e7 ? 0 : 11); // dated if old

/* ---- the page ---- */

// element("span.dim", { title }, "text"): makes a span of class mmlp-dim
function element(kind, attributes = {}, ...children) {
	const [tag, ...classes] = kind.split("."), made = document.createElement(tag);
	if (classes.length) made.className = classes.map((name) => `mmlp-${name}`).join(" ");
	if (tag === "button") made.type = "button";
	for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
	made.append(...children.filter((child) => child !== null));
	return made;
}
function replace(parent, name, ...children) { // the button with the focus keeps it
	const focused = parent.contains(document.activeElement) && document.activeElement.dataset[name];
	parent.replaceChildren(...children);
	if (focused) parent.querySelector(`[data-${name}="${focused}"]`)?.focus();
}
const setText = (node, text) => { if (node.textContent !== text) node.textContent = text; };
const setAttribute = (node, name, value) => { if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value); };

function swatch(colour, dash, width = 2) {
	const made = element("i");
	made.innerHTML = `<svg width="22" height="8" aria-hidden="true"><line x1="0" y1="4" x2="22" y2="4" stroke="${colour}" stroke-width="${width}" stroke-dasharray="${dash.join(" ")}"/></svg>`;
	return made.firstChild;
}

class View {
	constructor(store, el) {
		Object.assign(this, { store, el, axis: "sample", weight: 0.9, log: false, zoom: null, cursor: null, hidden: new Set(), off: new Set(), shown: {} });
		this.build();
		this.sizes = new ResizeObserver(() => { this.measured = false; this.store.schedule(); });
		for (const made of this.plots) this.sizes.observe(made.area);
		this.theme = new MutationObserver(() => this.store.schedule());
		this.theme.observe(document.body, { attributes: true });
	}
	close() { this.sizes.disconnect(); this.theme.disconnect(); }

	build() {
		const model = this.store.model, title = model.get("title");
		this.el.innerHTML = model.get("page");
		this.root = this.el.querySelector(".mmlp");
		for (const name of "state live main stop bar fill eta legend where axes last smooth help errors verdict tiles phase grid lastdata notes lost losttext title".split(" "))
			this[name] = this.root.querySelector(`.mmlp-${name}`);
		this.root.setAttribute("aria-label", `live panel of ${title}`);
		this.title.textContent = this.title.title = title;
		if (!model.get("steers")) for (const part of [this.main, this.stop, this.help.firstElementChild]) part.remove();
		this.plots = PLOTS.map((plot) => this.buildPlot(plot));
		this.grid.append(...this.plots.map((plot) => plot.figure));
		this.root.addEventListener("click", (event) => {
			const { do: act, line, measure, clear } = event.target.closest("button")?.dataset ?? {};
			if (act) { if (event.detail < 2) this[act](); } // the second of a double click on Start would pause
			else if (line) this.toggle(this.hidden, line);
			else if (measure) this.toggle(this.off, measure);
			else if (clear) this.store.tell({ kind: "clear", run: clear });
		});
		this.axes.addEventListener("change", () => this.setAxis(this.axes.value));
		this.last.addEventListener("change", () => this.setZoom(null));
		this.smooth.addEventListener("input", () => { this.weight = +this.smooth.value; this.store.schedule(); });
		for (const kind of ["keydown", "keyup", "keypress"]) {
			this.root.addEventListener(kind, (event) => {
				if (kind === "keydown") this.key(event);
				keep(event);
			});
		}
	}

	buildPlot(plot) {
		const figure = this.root.querySelector("template").content.firstElementChild.cloneNode(true), found = (name) => figure.querySelector(name);
		const [base, over] = figure.querySelectorAll("canvas"), area = found(".mmlp-area"), log = found(".mmlp-log");
		const made = { plot, figure, base, over, area, log, read: found(".mmlp-read"), keys: found(".mmlp-keys") };
		figure.dataset.plot = plot.id;
		found("b").textContent = base.ariaLabel = plot.title;
		log.hidden = !plot.robust;
		let from = null;
		const at = (event) => this.toX(made, event.clientX - area.getBoundingClientRect().left);
		area.addEventListener("pointerdown", (event) => { if (event.button === 0) { from = { x: at(event), px: event.clientX }; area.setPointerCapture(event.pointerId); } });
		area.addEventListener("pointermove", (event) => { this.cursor = at(event); this.selection = from && Math.abs(event.clientX - from.px) > 4 ? [from.x, this.cursor] : null; this.drawCursor(); });
		area.addEventListener("pointerup", (event) => {
			if (from && Math.abs(event.clientX - from.px) > 4) this.setZoom([from.x, at(event)].sort((a, b) => a - b));
			from = this.selection = null;
		});
		area.addEventListener("wheel", (event) => {
			if (!event.ctrlKey && !this.root.contains(document.activeElement)) return; // the page scrolls
			event.preventDefault();
			this.cursor = at(event);
			this.zoomBy(event.deltaY < 0 ? 0.8 : 1.25);
		}, { passive: false });
		area.addEventListener("pointerleave", () => { if (!from) { this.cursor = null; this.drawCursor(); } });
		area.addEventListener("dblclick", () => this.reset());
		return made;
	}

	press() { this.act(this.main.dataset.action); }
	end() { this.act("stop"); }
	reset() { this.last.value = ""; this.setZoom(null); }
	act(name) {
		if (this.store.model.get("steers") && this.can(name)) this.store.tell({ kind: "action", name });
	}
	can(name) {
		return !this.store.lost && { start: /^(?!running|paused|stopping)/, pause: /running/, resume: /paused/, stop: /running|paused/ }[name].test(this.store.state);
	}
	key(event) {
		if (event.ctrlKey || event.metaKey || event.altKey) return;
		const typing = event.target.matches("input, select, textarea"), key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
		if (typing && key !== "Escape") return;
		const moves = { ArrowLeft: -1, ArrowRight: 1 };
		if (key === "s") this.act("start");
		else if (key === "p") this.act(this.store.state === "paused" ? "resume" : "pause");
		else if (key === "x") this.act("stop");
		else if (key in moves) this.moveCursor(moves[key] * (event.shiftKey ? 10 : 1));
		else if (key === "+" || key === "=") this.zoomBy(0.5);
		else if (key === "-") this.zoomBy(2);
		else if (key === "0" || key === "Escape") this.reset();
		else if (key === "l") this.setLog();
		else if (key === "a") { const names = Object.keys(AXES); this.setAxis(names[(names.indexOf(this.axis) + 1) % names.length]); }
		else if (key >= "1" && key <= "9" && this.store.lines[key - 1]) this.toggle(this.hidden, this.store.lines[key - 1].key);
		else if (key === "?") this.toggleHelp();
		else return;
		event.preventDefault();
	}
	// Whether what a part of the page shows has changed.
	isNew(part, ...facts) {
		const wanted = JSON.stringify(facts);
		return this.shown[part] !== wanted && (this.shown[part] = wanted, true);
	}
	toggle(set, key) { if (!set.delete(key)) set.add(key); this.store.schedule(); }
	toggleHelp() { this.help.hidden = !this.help.hidden; }
	setAxis(axis) { this.axis = this.axes.value = axis; this.zoom = this.cursor = null; this.store.schedule(); }
	setLog() { this.log = !this.log; this.store.schedule(); }
	setZoom(range) { this.zoom = range && range[1] > range[0] ? range : null; this.selection = null; this.store.schedule(); }
	zoomBy(factor) {
		const [low, high] = this.xRange(), centre = this.cursor ?? (low + high) / 2;
		this.setZoom([centre - (centre - low) * factor, centre + (high - centre) * factor]);
	}
	moveCursor(by) {
		const [low, high] = this.xRange();
		this.cursor = Math.min(high, Math.max(low, (this.cursor ?? (low + high) / 2) + (by * (high - low)) / 200));
		this.drawCursor();
	}

	visible() { return this.store.lines.filter((line) => !this.hidden.has(line.key)); }
	xRange() {
		if (this.zoom) return this.zoom;
		let low = Infinity, high = -Infinity, recent = Infinity;
		for (const line of this.visible()) for (const track of Object.keys(this.store.tracks)) {
			const series = line.series(track);
			if (!series || !series.n) continue;
			const { array, sorted } = line.x(track, this.axis);
			if (track === "step" && !line.run.ghost) recent = Math.min(recent, array[Math.max(0, series.n - this.last.value)]);
			if (sorted) { low = Math.min(low, array[0]); high = Math.max(high, array[series.n - 1]); }
			else for (let i = 0; i < series.n; i++) { low = Math.min(low, array[i]); high = Math.max(high, array[i]); }
		}
		if (!(low <= high)) return [0, 1];
		if (this.last.value && recent < high) low = Math.max(low, recent);
		return low === high ? [low - 0.5, high + 0.5] : [low, high];
	}
	toX(made, px) {
		const [low, high] = this.xRange(), width = made.width - LEFT - RIGHT;
		return low + (Math.min(width, Math.max(0, px - LEFT)) / width) * (high - low);
	}
	colours() {
		const style = getComputedStyle(this.root);
		if (this.palette && this.palette.bg === style.backgroundColor && this.palette.fg === style.color) return this.palette;
		const [r, g, b] = (style.backgroundColor.match(/[\d.]+/g) ?? [255, 255, 255]).map(Number);
		const dark = 0.3 * r + 0.59 * g + 0.11 * b < 128, get = (name) => style.getPropertyValue(name).trim();
		return this.palette = { fg: style.color, dim: get("--dim"), grid: get("--line"), bg: style.backgroundColor, dark };
	}
	colourOf(line, colours) { return line.run.colours[+colours.dark]; }
	dashOf(line) { return RUN_DASHES[(line.several ? line.rank : line.run.dash) % RUN_DASHES.length]; }

	draw() {
		this.grid.hidden = !this.store.lines.some((line) => line.series("step")?.n);
		setText(this.phase, this.store.phase);
		if (!this.measured || this.plots[0].area.clientWidth !== this.plots[0].width) this.measure(); // cells out of sight have no size
		const colours = this.colours(), range = this.xRange();
		if (colours !== this.drawnWith) { this.drawnWith = colours; this.clean = false; }
		for (const made of this.plots) if (made.width) this.drawPlot(made.base.getContext("2d"), made, made.width, made.height, colours, range);
		this.drawWords(colours);
		for (const made of this.plots) this.drawKeys(made, colours);
		this.drawCursor(colours);
		const root = this.root.dataset, state = this.store.shownState;
		setText(this.live, `state: ${root.state = state}`);
		root.points = this.store.points;
		root.lines = this.visible().length;
		root.x = range.join(" ");
		root.seq = this.store.seq; // last: what it counts is drawn
	}

	measure() {
		this.measured = true;
		for (const made of this.plots) { made.width = made.area.clientWidth; made.height = made.area.clientHeight; }
		for (const made of this.plots) for (const canvas of [made.base, made.over]) if (made.width) fit(canvas, made.width, made.height);
	}

	// Lines of one plot: once for the range of y, once to draw.
	drawPlot(g, made, width, height, colours, [low, high]) {
		const { plot } = made, w = width - LEFT - RIGHT, h = height - TOP - BOTTOM, jobs = [];
		let bottom = plot.zero || plot.unit === "share" ? 0 : Infinity, top = plot.unit === "share" ? 0 : -Infinity;
		const soft = {}, values = []; // highest of each measure that sets no range; a sample of those that do
		const log = plot.robust && this.log;
		setAttribute(made.log, "aria-pressed", !!log);
		for (const line of this.visible()) plot.measures.forEach((measure, order) => {
			if (this.isExtra(line, measure, soft) || this.off.has(`${plot.id}.${measure.id}`)) return;
			const found = line.values(measure);
			if (!found) return;
			const { array: xs, sorted } = line.x(found.track, this.axis);
			const from = sorted ? Math.max(0, firstAtLeast(xs, found.n, low) - 1) : 0, to = sorted ? Math.min(found.n, firstAtLeast(xs, found.n, high) + 2) : found.n;
			const every = Math.ceil((to - from) / 400);
			const ys = line.smoothed(measure, found, this.weight), marked = measure.learnt && ((i) => !line.teaches(i) && (line.untaught = true));
			jobs.push({ line, measure, order, xs, ys, from, to, marked, cut: line.isCut(found.track, this.axis), values: found.values });
			for (let i = from; i < to; i++) {
				const y = found.values[i];
				if (!Number.isFinite(y) || xs[i] < low || xs[i] > high || marked?.(i)) continue;
				if (measure.soft) soft[measure.label] = Math.max(soft[measure.label] ?? 0, y);
				else if (log && y <= 0) continue;
				else { if (y < bottom || log && !bottom) bottom = y; if (y > top) top = y; if (i % every === 0) values.push(y); }
			}
		});
		if (plot.robust && values.length > 20) { // outliers are told in the corner
			values.sort((a, b) => a - b);
			const [q1, q3] = [0.1, 0.9].map((share) => values[Math.floor(share * values.length)]), room = 2 * (q3 - q1);
			if (top > q3 + room) { soft.highest = top; top = q3 + room; }
			if (bottom < q1 - room && !plot.zero && !log) bottom = q1 - room;
		}
		if (!(bottom <= top)) [bottom, top] = [0, Math.min(...Object.values(soft).filter((y) => y > 0), Infinity)];
		if (top === Infinity) top = 1;
		for (const y of Object.values(soft)) if (y > top && y < 1.7 * top) top = y;
		const scale = log ? Math.log10 : (y) => y;
		if (log) { bottom = Math.min(bottom, top / 1.2); top *= 1.05; bottom /= 1.05; }
		else if (plot.unit === "share") top = Math.min(1, Math.max(top * 1.1, 0.02));
		else { const pad = (top - bottom || Math.abs(top) || 1) * 0.06; top += pad; if (!plot.zero) bottom -= pad; }
		const px = (x) => LEFT + ((x - low) / (high - low)) * w, zero = scale(bottom), py = (y) => TOP + h - ((scale(y) - zero) / (scale(top) - zero)) * h;
		made.scale = { px, py };
		made.figure.dataset.y = `${bottom} ${top}`;
		g.clearRect(0, 0, width, height);
		g.font = "10.5" + FONT;
		g.lineWidth = 1;
		g.setLineDash([]);
		g.strokeStyle = colours.grid;
		g.fillStyle = colours.dim;
		g.textAlign = "right"; g.textBaseline = "middle";
		if (!jobs.length) return g.fillText("not measured", LEFT + w / 2 + 32, TOP + h / 2);
		for (const y of log ? logTicks(bottom, top) : ticks(bottom, top, 4, plot.unit)) {
			segment(g, LEFT, LEFT + w, Math.round(py(y)) + 0.5);
			g.fillText(plot.unit === "share" ? +(100 * y).toFixed(2) + " %" : inUnit(y, plot.unit), LEFT - 5, py(y));
		}
		g.textBaseline = "top";
		for (const x of ticks(low, high, Math.max(2, w / 52))) { g.textAlign = px(x) > LEFT + w - 14 ? "right" : "center"; g.fillText(number(x, 6, high), Math.min(px(x), LEFT + w), TOP + h + 4); }
		g.strokeRect(LEFT + 0.5, TOP + 0.5, w - 1, h - 1);
		g.save();
		g.beginPath(); g.rect(LEFT, TOP - 4, w + 4, h + 8); g.clip();
		g.lineJoin = "round";
		this.drawBands(g, px, h, colours);
		for (const job of jobs) {
			g.strokeStyle = g.fillStyle = this.colourOf(job.line, colours);
			const dash = plot.measures.length > 1 && plot.id !== "loss" ? MEASURE_DASHES[job.order] : this.dashOf(job.line);
			if (job.ys !== job.values) { g.globalAlpha = job.line.run.ghost ? 0 : 0.22; g.lineWidth = 1; g.setLineDash([]); trace(g, job, job.values, px, py); }
			g.globalAlpha = 1;
			g.lineWidth = job.order ? 1.2 : 1.6;
			g.setLineDash(job.to - job.from > w / 2 && !this.weight ? [] : dash); // a dense jagged line shows no dashes
			if (!job.measure.marks) trace(g, job, job.ys, px, py);
			for (let i = job.from; job.marked && i < job.to; i++) if (job.marked(i)) g.fillText("×", px(job.xs[i]), Math.max(TOP, py(Math.min(top, job.values[i])) - 5));
			const all = job.measure.marks || job.to - job.from < 3, alone = (i) => job.measure.sharp && !Number.isFinite(job.ys[i - 1]) && !Number.isFinite(job.ys[i + 1]);
			if (all || job.measure.sharp) { // also values that no line reaches
				g.setLineDash([]);
				for (let i = job.from; i < job.to; i++) if (Number.isFinite(job.ys[i]) && (all || alone(i))) disc(g, px(job.xs[i]), py(job.ys[i]));
			}
		}
		g.restore();
		made.words = soft.limit > top;
		let sunk = 0; // above 0: low at the right
		for (const { xs, ys, from, to } of jobs) for (let i = from; i < to; i += 1 + (to - from >> 9)) if (ys[i] <= top && px(xs[i]) > LEFT + w / 2) sunk += Math.sign(py(ys[i]) - TOP - h / 2);
		Object.entries(soft).filter(([, y]) => y > top).forEach(([label, y], i) => {
			const text = `${label} ${inUnit(y, plot.unit)} ↑`, at = [LEFT + w - 6, sunk > 0 ? TOP + 4 + 13 * i : TOP + h - 15 - 13 * i];
			g.textAlign = "right"; g.strokeStyle = colours.bg; g.fillStyle = colours.dim; g.lineWidth = 4; g.lineJoin = "round";
			g.strokeText(text, ...at); g.fillText(text, ...at);
		});
	}

	// A process's memory says little beside its tensors' bytes: it is no line.
	isExtra(line, measure, soft) {
		if (line.run[measure.source] !== "process RSS") return false;
		const bytes = { from: [["step", "predicted_bytes"], ["step", "limit_bytes"]] };
		const found = (line.run.peak_source !== "process RSS" || this.visible().some((each) => each.values(bytes))) && line.values(measure);
		if (found && soft) soft.process = Math.max(soft.process ?? 0, found.values[found.n - 1]);
		return !!found;
	}

	// On the axis of seconds, pauses are grey, turns have their scheduler's colour; on others pauses and epochs' ends are marks.
	drawBands(g, px, h, colours) {
		const lines = this.visible().filter((line) => line.series("step")?.n && line.rank === line.run.ranks[0] && !line.run.ghost);
		const band = (from, to, colour, alpha) => { g.globalAlpha = alpha; g.fillStyle = colour; g.fillRect(px(from), TOP, Math.max(2, px(to) - px(from)), h); };
		if (this.axis === "second") {
			const turns = lines.flatMap((line) => line.turns().map(([from, to]) => ({ line, from, to }))).sort((a, b) => a.from - b.from);
			if (lines.length > 1 && turns.every((turn, i) => !i || turns[i - 1].to <= turn.from + 0.2)) for (const { line, from, to } of turns) band(from, to, this.colourOf(line, colours), 0.1);
		}
		else for (const line of lines) if (line.series("eval")?.n < 30) for (const x of line.x("eval", this.axis).array.subarray(0, line.series("eval").n)) {
			g.globalAlpha = 0.3; g.fillStyle = this.colourOf(line, colours); g.fillRect(Math.round(px(x)) - 1, TOP, 2, h);
		}
		for (const line of lines) line.run.pauses.forEach(([from, to], k) => {
			const { array, sorted } = line.x("step", this.axis), n = line.series("step").n, after = line.pauses("step")[k][0];
			if (this.axis === "second") band(from, to ?? this.xRange()[1], colours.fg, 0.13);
			else if (sorted && after > 0) band(array[after - 1], array[Math.min(after, n - 1)], colours.fg, 0.13);
		});
		g.globalAlpha = 1;
	}

	drawCursor(colours = this.colours()) {
		const [low, high] = this.xRange(), x = this.cursor;
		if (x === null && !this.selection && this.clean) return;
		this.clean = x === null && !this.selection;
		for (const made of this.plots) made.over.hidden = this.clean; // a layer that shows nothing would be painted all the same
		setText(this.where, x === null ? "" : `${AXES[this.axis]} ${AXES[this.axis].endsWith("second") ? x.toFixed(1) : Math.round(x)}`);
		for (const made of this.plots) {
			const g = made.over.getContext("2d"), { width, height } = made;
			if (!width || !made.scale) continue;
			g.clearRect(0, 0, width, height);
			if (this.selection) {
				const [a, b] = this.selection.map(made.scale.px);
				g.globalAlpha = 0.18; g.fillStyle = colours.fg; g.fillRect(Math.min(a, b), TOP, Math.abs(b - a), height - TOP - BOTTOM); g.globalAlpha = 1;
			}
			made.read.hidden = x === null || x < low || x > high;
			if (made.read.hidden) continue;
			const at = made.scale.px(x);
			g.strokeStyle = colours.dim; g.setLineDash([3, 3]); g.beginPath(); g.moveTo(at, TOP); g.lineTo(at, height - BOTTOM); g.stroke();
			const rows = [];
			for (const line of this.visible()) {
				const parts = [];
				for (const measure of made.plot.measures) {
					const found = measure.soft || this.off.has(`${made.plot.id}.${measure.id}`) ? null : line.values(measure);
					if (!found) continue;
					const { array: xs, sorted } = line.x(found.track, this.axis), i = nearest(xs, found.n, x, sorted), last = found.n - 1;
					if (this.isExtra(line, measure) || sorted && (x > xs[last] + (high - low) / 500 || x < xs[0] - (xs[1] - xs[0] || 0))) continue; // ended, or not begun
					const y = line.smoothed(measure, found, this.weight)[i], nothing = found.track === "step" && (measure.learnt || measure.id === "loss") && !line.teaches(i), text = inUnit(y, made.plot.unit);
					if (!nothing && Number.isNaN(y)) continue;
					parts.push((made.plot.measures.length > 1 ? measure.label + " " : "") + (nothing ? `${measure.learnt ? text + ", " : ""}nothing to learn` : text));
					if (Number.isFinite(y)) { g.fillStyle = this.colourOf(line, colours); g.setLineDash([]); disc(g, made.scale.px(xs[i]), made.scale.py(y)); }
				}
				if (parts.length) {
					const dot = element("i");
					dot.style.background = this.colourOf(line, colours);
					rows.push(element("div", {}, dot, element("span.name", {}, `${line.label}: `), parts.join(", ")));
				}
			}
			made.read.replaceChildren(...rows);
			made.read.hidden = !rows.length;
			const wide = made.read.offsetWidth, from = made.figure.offsetLeft - this.grid.offsetLeft, left = at < LEFT + (width - LEFT) / 2 ? at + 8 : at - 8 - wide;
			made.read.style.left = `${Math.max(-from, Math.min(left, this.grid.clientWidth - from - wide))}px`; // inside the grid
		}
	}

	drawWords(colours) {
		const store = this.store, state = store.shownState;
		setText(this.state, state);
		const main = { running: ["pause", "❚❚ Pause"], paused: ["resume", "▶ Resume"], stopping: ["pause", "❚❚ Pause"] }[store.state] ?? ["start", "▶ Start"];
		this.main.dataset.action = main[0];
		setText(this.main, main[1]);
		setAttribute(this.main, "aria-disabled", !this.can(main[0])); // not `disabled`, which would lose the focus
		setAttribute(this.stop, "aria-disabled", !this.can("stop"));
		const [share, left] = store.progress, percent = share === null ? 0 : Math.round(1000 * share) / 10;
		this.bar.hidden = share === null;
		setAttribute(this.bar, "aria-valuenow", percent);
		this.fill.style.width = `${percent}%`;
		setText(this.eta, share === null ? "" : `${percent} %` + (left && state === "running" && share < 1 ? `, ${duration(left)} left` : ""));
		setText(this.lastdata, store.last_s ? `Last data: ${clock(1000 * store.last_s)}.` : "");
		this.lost.hidden = !store.lost && !store.busy;
		if (!this.lost.hidden) {
			const since = store.heard ? `No word from the kernel since ${clock(store.heard)}${store.last_s ? `; last data ${clock(1000 * store.last_s)}` : ""}. ` : "";
			setText(this.losttext, since + (store.lost ? "It was restarted, and a run that it had started ended with it, unless detached. Lab.open(FOLDER) shows what was trained; this cell starts anew." : "It is busy. If no cell runs, it is gone: run the cell again."));
		}
		this.drawLegend(colours);
		this.drawTiles(colours);
		this.drawErrors();
		this.drawNotes();
	}

	drawTiles(colours) {
		if (!this.isNew("tiles", this.store.tiles, this.store.verdict, this.store.runs.map((run) => run.colours), colours.dark)) return;
		setText(this.verdict, this.store.verdict);
		this.verdict.hidden = !this.store.verdict;
		this.tiles.replaceChildren(...this.store.tiles.flatMap((tile) => {
			const { name, colours: pair } = this.store.runs.find((run) => run.id === tile.id) ?? {};
			if (!name) return [];
			const made = element("div.tile", { "data-tile": name, title: `${name}: its median epoch, and all of its steps so far` }, element("b", {}, name),
				...tile.figures.map(([label, text]) => element("span", {}, element("span.dim", {}, label), element("b", {}, text))),
				...tile.gauges.map(([label, busy, used, total]) => element("span.gauge", {}, element("span.dim", {}, label),
				element("meter", { value: busy, max: 1 }), `${inUnit(busy, "share")} busy`, element("meter", { value: used, max: total }), `${inUnit(used, "bytes")} of ${inUnit(total, "bytes")}`)));
			made.style.borderLeftColor = pair[+colours.dark];
			return [made];
		}));
	}

	drawLegend(colours) {
		if (!this.isNew("legend", this.store.lines.map((line) => [line.key, line.label, this.hidden.has(line.key)]), colours.dark)) return;
		replace(this.legend, "line", ...this.store.lines.map((line) => {
			const shown = !this.hidden.has(line.key);
			const toggle = element("button.key", { "data-line": line.key, "aria-pressed": shown, title: "hide or show" },
				swatch(this.colourOf(line, colours), this.dashOf(line)), line.label);
			const clear = element("button.clear", { "data-clear": line.run.id, "aria-label": `clear ${line.run.name}`, title: "clear from the panel; its files stay" }, "×");
			return element("span.entry", {}, toggle, line.several && line.rank !== line.run.ranks[0] ? null : clear);
		}));
	}

	drawKeys(made, colours) {
		const { plot } = made, found = plot.measures.map((measure) => this.store.lines.some((line) => !this.isExtra(line, measure) && line.values(measure)));
		const several = found.filter(Boolean).length > 1;
		const sources = plot.measures.map((measure) => measure.source ? [...new Set(this.store.runs.map((run) => run[measure.source]).filter(Boolean))].join(", ") : "");
		const off = plot.measures.map((measure) => this.off.has(`${plot.id}.${measure.id}`));
		const untaught = this.store.lines.some((line) => line.untaught);
		if (!this.isNew(plot.id, found, off, sources, untaught, made.words, colours.dark)) return;
		replace(made.keys, "measure", ...plot.measures.flatMap((measure, order) => {
			const source = sources[order] && `(${sources[order]})`, nothing = untaught && measure.learnt;
			if (!found[order]) return [];
			if (!several) return [element("span.dim", { title: nothing ? "such as the last batch of an epoch with one image, which has no other to be told from" : "" }, nothing ? "× nothing to learn" : source)];
			return [element("button.key", { "data-measure": `${plot.id}.${measure.id}`, "aria-pressed": !off[order], title: "hide or show" },
				measure.marks ? "● " : measure.soft && made.words ? null : swatch(colours.dim, plot.id === "loss" ? [] : MEASURE_DASHES[order], 1.6), `${measure.label} ${source}`.trim())];
		}));
	}

	drawErrors() {
		if (!this.isNew("errors", this.store.errors)) return;
		this.errors.replaceChildren(...this.store.errors.map((error) => element("div.error", { role: "alert", "data-where": error.where },
			element("strong", {}, `${{ training: "Training failed", callback: "That did not work", reading: "A run cannot be read" }[error.where] ?? "The panel failed"}: `), error.text,
			traceback(error.traceback))));
	}

	drawNotes() {
		if (!this.isNew("notes", this.store.notes)) return;
		const notes = this.store.notes;
		this.notes.hidden = !notes.length;
		const lines = notes.map((note) => `${clock(1000 * note.time_s)}  ${note.run}  ${note.kind}${note.step >= 0 ? ` at step ${note.step}` : ""}: ${note.text}${note.traceback ? "\n" + note.traceback : ""}`);
		this.notes.replaceChildren(element("summary", {}, `messages: ${notes.length}`), element("pre", {}, lines.join("\n")));
	}

	fileName(suffix) { return `${(this.store.model.get("title").split(/[\\/]/).filter(Boolean).pop() ?? "run").replace(/[^\w.-]+/g, "_")}.${suffix}`; }
	saveCsv() {
		const keys = [...new Set(Object.values(this.store.tracks).flat())], lines = [["run", "rank", "kind", "samples_seen", "padded_tokens_seen", ...keys].join(",")];
		for (const line of this.store.lines) for (const track of Object.keys(this.store.tracks)) {
			const series = line.series(track);
			if (!series) continue;
			const samples = line.x(track, "sample").array, tokens = line.x(track, "token").array, columns = keys.map((key) => series.columns[key]);
			const name = `"${line.run.name.replaceAll('"', '""')}"`;
			for (let i = 0; i < series.n; i++) lines.push([name, line.rank, track, short(samples[i]), short(tokens[i]), ...columns.map((column) => (column ? single(column[i]) : ""))].join(","));
		}
		download(new Blob([lines.join("\n") + "\n"], { type: "text/csv" }), this.fileName("csv"));
	}
	savePng() {
		const colours = this.colours(), lines = this.visible(), scale = 2, top = 54, range = this.xRange(), corner = this.grid.getBoundingClientRect();
		const canvas = element("canvas"), g = canvas.getContext("2d");
		canvas.width = scale * corner.width; canvas.height = scale * (top + corner.height);
		g.scale(scale, scale);
		g.fillStyle = colours.fg; g.textBaseline = "middle"; g.font = "600 14" + FONT;
		g.fillText(`${this.store.model.get("title")}: ${this.store.state}; x: ${AXES[this.axis]}`, 10, 16);
		g.font = "12" + FONT;
		let x = 10;
		for (const line of lines) {
			g.strokeStyle = this.colourOf(line, colours); g.lineWidth = 2; g.setLineDash(this.dashOf(line));
			segment(g, x, x + 24, 38); g.fillText(line.label, x + 29, 38); x += 46 + g.measureText(line.label).width;
		}
		for (const made of this.plots) {
			const at = made.area.getBoundingClientRect(), x = at.x - corner.x, y = top + at.y - corner.y;
			g.save();
			g.translate(x, y);
			this.drawPlot(g, made, made.width, made.height, colours, range);
			g.restore();
			g.font = "600 12" + FONT;
			g.fillText([made.plot.title, [...made.keys.children].map((key) => key.textContent).join(", ")].filter(Boolean).join(": "), x + 2, y - 10, made.width - 4);
		}
		g.globalCompositeOperation = "destination-over";
		g.fillStyle = colours.bg; g.fillRect(0, 0, corner.width, top + corner.height);
		canvas.toBlob((blob) => download(blob, this.fileName("png")), "image/png");
	}
}

const single = (value) => { // the shortest text that is this float32 again
	if (!Number.isFinite(value)) return Number.isNaN(value) ? "" : String(value);
	if (Number.isInteger(value)) return String(value);
	for (let digits = 6; digits < 9; digits++) { const text = +value.toPrecision(digits); if (Math.fround(text) === value) return String(text); }
	return String(+value.toPrecision(9));
};
const short = (value) => String(+value.toPrecision(12));

function traceback(text) {
	if (!text) return "";
	const pre = element("pre", {}, text), copy = element("button.copy", {}, "Copy");
	copy.onclick = async () => {
		getSelection().selectAllChildren(pre);
		try { await navigator.clipboard.writeText(text); } catch { document.execCommand("copy"); }
		setText(copy, "Copied");
	};
	return element("details", { open: "" }, element("summary", {}, "traceback ", copy), pre);
}

function download(blob, name) {
	const url = URL.createObjectURL(blob), link = element("a", { href: url, download: name });
	document.body.append(link);
	link.click();
	link.remove();
	setTimeout(() => URL.revokeObjectURL(url), 10000);
}

function disc(g, x, y) { g.beginPath(); g.arc(x, y, 3, 0, 7); g.fill(); }
function segment(g, from, to, y) { g.beginPath(); g.moveTo(from, y); g.lineTo(to, y); g.stroke(); }

// A canvas at the screen's resolution, its units CSS pixels.
function fit(canvas, width, height) {
	const ratio = window.devicePixelRatio || 1;
	canvas.width = Math.round(width * ratio);
	canvas.height = Math.round(height * ratio);
	canvas.getContext("2d").setTransform(ratio, 0, 0, ratio, 0, 0);
}

function nearest(xs, n, x, sorted) {
	if (!sorted) { let best = 0; for (let i = 1; i < n; i++) if (Math.abs(xs[i] - x) < Math.abs(xs[best] - x)) best = i; return best; }
	const after = Math.min(n - 1, firstAtLeast(xs, n, x));
	return after > 0 && x - xs[after - 1] <= xs[after] - x ? after - 1 : after;
}

// A path through rows from..to: each pixel column's first, lowest, highest, last; gaps at NaN and `cut`.
function trace(g, { xs, from, to, cut, marked }, ys, px, py) {
	const path = new Path2D();
	let column = NaN, low = 0, high = 0, last = 0, lowFirst = true, open = false;
	const leave = () => {
		if (low === high) return;
		const a = lowFirst ? low : high, b = lowFirst ? high : low;
		path.lineTo(column, py(a)); path.lineTo(column, py(b)); path.lineTo(column, py(last));
	};
	for (let i = from; i < to; i++) {
		const y = ys[i];
		if (marked?.(i)) continue;
		const at = Math.round(px(xs[i]));
		if (open && (!Number.isFinite(y) || at < column || cut?.(i))) { leave(); open = false; column = NaN; }
		if (!Number.isFinite(y)) continue;
		if (open && at === column) {
			if (y < low) { low = y; lowFirst = false; } else if (y > high) { high = y; lowFirst = true; }
			last = y;
			continue;
		}
		if (open) { leave(); path.lineTo(at, py(y)); } else path.moveTo(at, py(y));
		open = true; column = at; low = high = last = y;
	}
	if (open) leave();
	if (to - from > 64) strokeWide(g, path); else g.stroke(path);
}

// Without a GPU, a jagged line of one pixel is drawn ten times as fast as a wider one, so that is several.
const BESIDE = [[[0, 0]], [[1, 1], [-1, -1]], [[0, 0], [0, 1.1], [0.95, -0.55], [-0.95, -0.55]]];
function strokeWide(g, path) {
	const ratio = g.getTransform().a, width = g.lineWidth, thin = 1 / ratio;
	if (width > 4 * thin) return g.stroke(path);
	const off = Math.max(0, width - thin) / 2;
	g.lineWidth = Math.min(width, thin);
	for (const [x, y] of BESIDE[off ? (width > 2.2 * thin ? 2 : 1) : 0]) { g.translate(x * off, y * off); g.stroke(path); g.translate(-x * off, -y * off); }
	g.lineWidth = width;
}

/* ---- the widget ---- */

// A notebook would handle b, d d, ... itself.
function keep(event) { if (!event.ctrlKey && !event.metaKey) event.stopPropagation(); }

const stores = new Map();
function storeOf(model) {
	const uid = model.get("uid");
	if (!stores.has(uid)) stores.set(uid, new Store(model));
	return stores.get(uid);
}
function initialize({ model }) {
	const store = storeOf(model);
	return () => { store.close(); stores.delete(model.get("uid")); };
}
function render({ model, el }) {
	const store = storeOf(model), view = new View(store, el);
	store.attach(view);
	return () => { view.close(); store.detach(view); };
}
export default { initialize, render };
