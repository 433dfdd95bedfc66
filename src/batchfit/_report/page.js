"use strict";
(() => {
  const root = document.documentElement;
  root.classList.add("js");
  const tip = document.getElementById("tip");
  const all = (where, what) => Array.from(where.querySelectorAll(what));
  let marked = null;

  // The browser's own tooltips would stand beside ours: texts become names, which screen readers read too.
  // Only the first drawing of a chart has them; the others have the same points in the same order.
  for (const plot of all(document, ".plot")) {
    const told = all(plot.querySelector("svg"), ".pt").map((point) => point.querySelector("title").textContent);
    for (const svg of all(plot, "svg")) {
      svg.setAttribute("aria-label", svg.querySelector(":scope > title").textContent);
      svg.removeAttribute("aria-labelledby");
      all(svg, ".pt").forEach((point, number) => point.setAttribute("aria-label", told[number]));
    }
    for (const title of all(plot, "title")) title.remove();
  }
  const textOf = (point) => point.getAttribute("aria-label") || "";

  function show(point) {
    hide();
    marked = point;
    point.classList.add("near");
    tip.textContent = textOf(point);
    tip.hidden = false;
    const at = point.getBoundingClientRect();
    const own = tip.getBoundingClientRect();
    const x = at.left + at.width / 2 - own.width / 2;
    const left = Math.max(8, Math.min(x, root.clientWidth - own.width - 8));
    const top = at.top - own.height - 10 < 4 ? at.bottom + 10 : at.top - own.height - 10;
    tip.style.left = left + window.scrollX + "px";
    tip.style.top = top + window.scrollY + "px";
  }
  function hide() {
    if (marked) marked.classList.remove("near");
    marked = null;
    tip.hidden = true;
  }
  // The nearest point, so that a finger or a hasty pointer finds one too.
  function nearest(svg, x, y) {
    let best = null, least = 36 * 36;
    for (const point of all(svg, ".pt")) {
      if (point.closest(".off")) continue;
      const at = point.getBoundingClientRect();
      const dx = at.left + at.width / 2 - x, dy = at.top + at.height / 2 - y;
      // What has a shape goes before the vertices of a curve.
      // Over a timeline the moment counts, not how high the pointer is.
      const high = svg.dataset.x && point.tagName === "circle" ? dy / 8 : dy;
      const far = (dx * dx + high * high) * (point.tagName === "circle" ? 2.5 : 1);
      if (far < least && textOf(point)) { least = far; best = point; }
    }
    return best;
  }
  for (const svg of all(document, "svg.bf-chart")) {
    const follow = (event) => {
      const point = nearest(svg, event.clientX, event.clientY);
      if (point !== marked) { if (point) show(point); else hide(); }
    };
    svg.addEventListener("pointermove", follow);
    svg.addEventListener("pointerdown", follow);
    svg.addEventListener("pointerleave", hide);
    for (const point of all(svg, ".pt[tabindex]")) {
      point.addEventListener("focus", () => show(point));
      point.addEventListener("blur", hide);
    }
  }
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });

  // A stretch of the x axis as wide as the whole: drawn with the pointer, or by the button, the last quarter.
  function zoomable(figure) {
    const charts = all(figure, "svg.bf-chart[data-x]");
    if (!charts.length) return;
    let shown = [0, 1];
    const back = figure.querySelector('button[data-zoom="all"]');
    function look(from, to) {
      shown = [from, to];
      const whole = from <= 0 && to >= 1;
      for (const svg of charts) {
        const [begin, end, low, high] = svg.dataset.x.split(" ").map(Number);
        const scale = 1 / (to - from), left = begin + from * (end - begin);
        const moves = svg.querySelector(".moves");
        if (whole) moves.removeAttribute("transform");
        else moves.setAttribute("transform", `translate(${begin - left * scale} 0) scale(${scale} 1)`);
        svg.classList.toggle("zoomed", !whole);
        // Marks keep their shape, and nothing is drawn beyond the axis.
        for (const mark of all(moves, "g.pt")) {
          if (!mark.dataset.whole) mark.dataset.whole = mark.getAttribute("transform");
          mark.setAttribute("transform", mark.dataset.whole + (whole ? "" : ` scale(${1 / scale} 1)`));
        }
        const frame = svg.querySelector("clipPath rect");
        if (!frame.dataset.whole) frame.dataset.whole = frame.getAttribute("width");
        frame.setAttribute("width", whole ? frame.dataset.whole : String(end - begin));
        for (const tick of all(svg, ".dim.mid text")) {
          if (!tick.dataset.whole) tick.dataset.whole = tick.textContent;
          const share = (Number(tick.getAttribute("x")) - begin) / (end - begin);
          const value = low + (from + share * (to - from)) * (high - low);
          tick.textContent = whole ? tick.dataset.whole : Math.round(value).toLocaleString("en-US");
        }
      }
      back.disabled = whole;
      hide();
    }
    for (const svg of charts) {
      const at = (event) => {
        const [begin, end] = svg.dataset.x.split(" ").map(Number);
        const box = svg.getBoundingClientRect();
        const x = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
        const share = Math.min(Math.max((x - begin) / (end - begin), 0), 1);
        return shown[0] + share * (shown[1] - shown[0]);
      };
      let from = null;
      svg.addEventListener("pointerdown", (event) => { from = at(event); });
      svg.addEventListener("pointerup", (event) => {
        const to = at(event), first = from;
        from = null;
        if (first !== null && Math.abs(to - first) > 0.01 * (shown[1] - shown[0]))
          look(Math.min(first, to), Math.max(first, to));
      });
      svg.addEventListener("dblclick", () => look(0, 1));
    }
    figure.querySelector('button[data-zoom="in"]').addEventListener("click", () =>
      look(shown[1] - (shown[1] - shown[0]) / 4, shown[1]));
    back.addEventListener("click", () => look(0, 1));
  }

  for (const figure of all(document, "figure")) {
    for (const button of all(figure, "button[data-to-axis]")) {
      button.addEventListener("click", () => {
        figure.dataset.axis = button.dataset.toAxis;
        for (const other of all(figure, "button[data-to-axis]"))
          other.setAttribute("aria-pressed", String(other === button));
        hide();
      });
    }
    for (const button of all(figure, "button[data-to-view]")) {
      button.addEventListener("click", () => {
        figure.dataset.view = button.dataset.toView;
        const data = figure.querySelector("details");
        if (data) data.open = button.dataset.toView === "table";
        for (const other of all(figure, "button[data-to-view]"))
          other.setAttribute("aria-pressed", String(other === button));
        hide();
      });
    }
    zoomable(figure);
    for (const button of all(figure, "button[data-of]")) {
      button.addEventListener("click", () => {
        const on = button.getAttribute("aria-pressed") !== "true";
        button.setAttribute("aria-pressed", String(on));
        for (const part of all(figure, `svg.bf-chart [data-series="${button.dataset.of}"]`))
          part.classList.toggle("off", !on);
        hide();
      });
    }
  }
})();
