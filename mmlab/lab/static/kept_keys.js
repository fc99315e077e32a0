// A notebook would take b, d d, ... for itself. Ctrl and Cmd combinations are let through, as the live panel does.
function keep(event) { if (!event.ctrlKey && !event.metaKey) event.stopPropagation(); }
function render({ el }) {
  let frame = requestAnimationFrame(function attach() { // the panel may not stand in the page yet
    const panel = el.closest(".mmlab-panel");
    if (!panel) { frame = requestAnimationFrame(attach); return; }
    for (const kind of ["keydown", "keyup", "keypress"]) panel.addEventListener(kind, keep);
    panel.dataset.keys = "kept";
  });
  return () => cancelAnimationFrame(frame);
}
export default { render };
