"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const SVG = "http://www.w3.org/2000/svg";
  const make = (name, attributes = {}, text = "") => {
    const element = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text) element.textContent = text;
    return element;
  };
  const html = (name, attributes = {}, text = "") => {
    const element = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.textContent = text;
    return element;
  };
  const legend = (entries) => {
    const list = html("div", { class: "legend" });
    for (const [style, text] of entries) {
      const entry = html("span");
      const swatch = make("svg", { viewBox: "0 0 10 10", "aria-hidden": "true" });
      swatch.append(make("rect", { width: 10, height: 10, class: style }));
      entry.append(swatch, document.createTextNode(text));
      list.append(entry);
    }
    return list;
  };

  // Light or dark: what the system says until the reader chooses.
  const theme = document.getElementById("theme");
  const isDark = () => document.documentElement.dataset.theme
    ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  const nameTheme = () => { theme.textContent = isDark() ? "light" : "dark"; };
  const turn = () => { document.documentElement.dataset.theme = isDark() ? "light" : "dark"; nameTheme(); };
  theme.hidden = false;
  theme.addEventListener("click", turn);
  nameTheme();

  // Timeline: only what is seen is drawn, and of events that share a pixel the first.
  const chart = document.getElementById("chart");
  const said = document.getElementById("event");
  const ROW = 26, TOP = 22, LEFT = 110;
  if (chart) {
    const last = Math.max(1e-9, ...data.lanes.map((lane) => Math.max(0, ...lane.events.map((event) => event[2]))));
    let from = 0, to = last;
    const asked = /^#timeline=([\d.]+)-([\d.]+)$/.exec(location.hash);
    if (asked && +asked[2] > +asked[1]) [from, to] = [+asked[1], Math.min(+asked[2], last)];
    const tell = (lane, event) => {
      const [kind, start, end, label, detail, line] = event;
      const when = data.clock ? `${start.toFixed(3)} s, ${(end - start).toFixed(3)} s long` : `number ${start + 1}`;
      said.textContent = [`ranks ${lane.ranks}`, kind, label, when, detail, line].filter(Boolean).join(" · ");
    };
    const draw = () => {
      const width = chart.clientWidth || 800, height = TOP + ROW * data.lanes.length + 4;
      const x = (time) => LEFT + (time - from) / (to - from) * (width - LEFT - 8);
      const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, height });
      for (let tick = 0; tick <= 4; tick++) {
        const time = from + (to - from) * tick / 4;
        const text = data.clock ? `${time.toPrecision(3)} s` : `${tick < 4 ? Math.floor(time) + 1 : Math.ceil(time)}`;
        svg.append(make("text", { x: x(time), y: 14, class: "soft", "text-anchor": tick === 4 ? "end" : "start" }, text));
      }
      data.lanes.forEach((lane, number) => {
        const y = TOP + ROW * number;
        svg.append(make("line", { x1: 0, x2: width, y1: y, y2: y, class: "row" }));
        const name = lane.ranks.length > 12 ? `${lane.ranks.slice(0, 11)}…` : lane.ranks;
        const title = make("text", { x: 4, y: y + 17, "font-weight": lane.odd ? 700 : 400 }, `${lane.odd ? "▸ " : ""}${name}`);
        title.append(make("title", {}, `ranks ${lane.ranks}`));
        svg.append(title);
        let right = -1;
        for (const event of lane.events) {
          const [kind, start, end] = event;
          if (end < from || start > to) continue;
          const left = Math.max(LEFT, x(start)), wide = Math.max(2, Math.min(width - 8, x(end)) - left - 1);
          if (left + wide <= right + 1 && kind === "calls") continue;
          right = left + wide;
          const box = make("rect", { x: left, y: y + 5, width: wide, height: ROW - 9, rx: 2, class: `k-${kind}` });
          box.append(make("title", {}, [kind, event[3], event[4], event[5]].filter(Boolean).join("\n")));
          box.addEventListener("mouseenter", () => tell(lane, event));
          box.addEventListener("click", () => tell(lane, event));
          svg.append(box);
        }
        if (lane.more) svg.append(make("text", { x: width - 8, y: y + 17, "text-anchor": "end", class: "soft" }, `${lane.more} more`));
      });
      chart.replaceChildren(svg);
    };
    let pending = 0;
    const later = () => { cancelAnimationFrame(pending); pending = requestAnimationFrame(draw); };
    const show = (start, end) => {
      const least = last / 1e5, length = Math.min(last, Math.max(least, end - start));
      from = +Math.min(Math.max(0, start), last - length).toPrecision(6);
      to = length === last ? last : +(from + length).toPrecision(6); // as the link of it says
      later();
    };
    const zoom = (factor, at = (from + to) / 2) => show(at - (at - from) * factor, at + (to - at) * factor);
    const move = (share) => show(from + (to - from) * share, to + (to - from) * share);
    const noted = () => history.replaceState(null, "", from === 0 && to === last ? "#timeline" : `#timeline=${from}-${to}`);
    chart.addEventListener("keydown", (event) => {
      const keys = { ArrowLeft: () => move(-0.2), ArrowRight: () => move(0.2), "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6), 0: () => show(0, last) };
      if (!(event.key in keys)) return;
      event.preventDefault();
      event.stopPropagation();
      keys[event.key]();
      noted();
    });
    const timeAt = (event) => {
      const box = chart.getBoundingClientRect();
      return from + Math.max(0, event.clientX - box.left - LEFT) / Math.max(1, box.width - LEFT - 8) * (to - from);
    };
    chart.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      zoom(event.deltaY > 0 ? 1.25 : 0.8, timeAt(event));
      noted();
    }, { passive: false });
    let grabbed = null;
    chart.addEventListener("pointerdown", (event) => { grabbed = { x: event.clientX, from, to }; });
    addEventListener("pointermove", (event) => {
      if (!grabbed) return;
      const shift = (grabbed.x - event.clientX) / Math.max(1, chart.clientWidth - LEFT) * (grabbed.to - grabbed.from);
      show(grabbed.from + shift, grabbed.to + shift);
    });
    addEventListener("pointerup", () => { if (grabbed && grabbed.from !== from) noted(); grabbed = null; });
    const kinds = [...new Set(data.lanes.flatMap((lane) => lane.events.map((event) => event[0])))];
    const tools = html("div", { class: "layers" });
    for (const [text, title, act] of [["+", "zoom in", () => zoom(0.6)], ["−", "zoom out", () => zoom(1 / 0.6)], ["all", "show all", () => show(0, last)]]) {
      const button = html("button", { type: "button", title }, text);
      button.addEventListener("click", () => { act(); noted(); });
      tools.append(button);
    }
    chart.before(tools);
    chart.after(legend(kinds.map((kind) => [`k-${kind}`, kind])));
    addEventListener("resize", later);
    draw();
  }

  // Ranks as squares, in the colour of what they have.
  const grid = document.getElementById("grid");
  const about = document.getElementById("rank");
  if (data.grid.length) {
    const named = /^#ranks=(.+)$/.exec(decodeURIComponent(location.hash));
    let shown = named ? data.grid.findIndex((layer) => layer.name === named[1]) : -1;
    if (shown < 0) shown = Math.max(0, data.grid.findIndex((layer) => layer.groups.length > 1));
    let chosen = -1;
    const buttons = html("div", { class: "layers", role: "group", "aria-label": "Layer" });
    const picture = html("div", { tabindex: "0", role: "img", class: "picture" });
    const names = html("div");
    const style = (code) => (code < 0 ? "g-1" : `g${code % 8}`);
    const columns = () => Math.max(1, Math.min(data.size, data.size <= 64 ? 16 : 8 * Math.floor(Math.max(128, picture.clientWidth || 800) / 128)));
    const draw = () => {
      const layer = data.grid[shown], across = columns(), side = data.size <= 64 ? 34 : 14;
      const svg = make("svg", { viewBox: `0 0 ${across * side} ${Math.ceil(data.size / across) * side}` });
      svg.style.maxWidth = `${across * side}px`;
      layer.codes.forEach((code, rank) => {
        const x = (rank % across) * side, y = Math.floor(rank / across) * side;
        const box = make("rect", { x: x + 1, y: y + 1, width: side - 2, height: side - 2, rx: 2, class: style(code) + (rank === chosen ? " chosen" : "") });
        box.append(make("title", {}, `rank ${rank}`));
        box.addEventListener("click", () => choose(rank));
        svg.append(box);
        if (side > 20) svg.append(make("text", { x: x + side / 2, y: y + side / 2 + 4, "text-anchor": "middle", "pointer-events": "none" }, String(rank)));
      });
      picture.replaceChildren(svg);
      picture.setAttribute("aria-label", `${layer.name}: ${layer.groups.length} different, ranks ${layer.groups.join(" | ")}`);
      const groups = layer.groups.map((ranks, number) => [style(number), `ranks ${ranks}`]).slice(0, 40);
      if (layer.codes.includes(-1)) groups.push(["g-1", "not observed"]);
      names.replaceChildren(legend(groups));
      [...buttons.children].forEach((button, number) => button.setAttribute("aria-pressed", String(number === shown)));
    };
    const choose = (rank) => {
      chosen = Math.max(0, Math.min(data.size - 1, rank));
      const apart = data.grid.map((layer) => `${layer.name}: ${layer.codes[chosen] < 0 ? "not observed" : layer.groups.length === 1 ? "equal" : `as ranks ${layer.groups[layer.codes[chosen]]}`}`);
      about.textContent = `rank ${chosen} · ${apart.join(" · ")}`;
      draw();
    };
    data.grid.forEach((layer, number) => {
      const button = html("button", { type: "button" }, layer.groups.length > 1 ? `${layer.name} (${layer.groups.length})` : layer.name);
      button.addEventListener("click", () => { shown = number; history.replaceState(null, "", `#ranks=${layer.name}`); draw(); });
      buttons.append(button);
    });
    picture.addEventListener("keydown", (event) => {
      const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns(), ArrowDown: columns() };
      if (!(event.key in steps)) return;
      event.preventDefault();
      choose(chosen < 0 ? 0 : chosen + steps[event.key]);
    });
    grid.append(buttons, picture, names);
    addEventListener("resize", draw);
    draw();
  }

  // All guards, and those with a text.
  const filter = document.getElementById("guard-filter");
  if (filter) {
    const tools = document.getElementById("guard-tools"), place = document.getElementById("all-guards");
    const MOST = 300;
    const list = () => {
      const wanted = filter.value.toLowerCase();
      const body = html("tbody");
      let number = 0;
      for (const { where, rows } of data.guards) {
        for (const [name, line, values] of rows) {
          if (wanted && ![name, line, ...values.flat()].join(" ").toLowerCase().includes(wanted)) continue;
          if (++number > MOST) continue;
          values.forEach(([ranks, text], at) => {
            const row = html("tr", values.length > 1 ? { class: "differs" } : {});
            row.append(html("td", {}, at ? "" : name), html("td", {}, ranks), html("td", {}, text), html("td", {}, at ? "" : [where, line].filter(Boolean).join(" · ")));
            body.append(row);
          });
        }
      }
      const table = html("table"), head = html("thead"), names = html("tr");
      names.append(...["guard on", "ranks", "guard", "compile, line"].map((text) => html("th", {}, text)));
      head.append(names);
      table.append(head, body);
      const wide = html("div", { class: "wide" });
      wide.append(table);
      place.replaceChildren(wide, html("p", { class: "note" }, number > MOST ? `${MOST} of ${number} guards` : `${number} guards`));
    };
    const details = html("details"), asked = /^#guards=(.+)$/.exec(decodeURIComponent(location.hash));
    details.append(html("summary", {}, `all ${data.guards.reduce((sum, one) => sum + one.rows.length, 0)} guards`), tools, place);
    document.getElementById("guards").append(details);
    tools.hidden = false;
    details.addEventListener("toggle", () => { if (details.open && !place.children.length) list(); });
    filter.addEventListener("input", () => { history.replaceState(null, "", `#guards=${encodeURIComponent(filter.value)}`); list(); });
    if (asked) { filter.value = asked[1]; details.open = true; }
  }

  // Deep links with a part of their own lead to its section.
  const section = /^#(timeline|ranks|guards)=/.exec(location.hash);
  if (section) document.getElementById(section[1]).scrollIntoView();

  // Keys.
  const help = document.getElementById("help");
  const differences = [...document.querySelectorAll(".difference")];
  let at = -1;
  const go = (step) => {
    if (!differences.length) return;
    at = Math.max(0, Math.min(differences.length - 1, at + step));
    location.hash = differences[at].id;
  };
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName)) return;
    const links = [...document.querySelectorAll("nav a")];
    if (/^[1-8]$/.test(event.key) && links[event.key - 1]) location.hash = links[event.key - 1].hash;
    else if (event.key === "n") go(1);
    else if (event.key === "p") go(-1);
    else if (event.key === "t") turn();
    else if (event.key === "?") help.showModal();
    else if (event.key === "/" && filter) { event.preventDefault(); filter.closest("details").open = true; filter.focus(); }
  });
  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((one) => { one.open = true; }));
})();
