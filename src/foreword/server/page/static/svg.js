// SVG shapes. Pictures have coordinates of their own; when they grow, only the view box changes.

export function shape(name, attributes = {}) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, String(value));
  return made;
}

// Return a function that schedules `act` for the next frame; several calls within a frame run it once.
export function oncePerFrame(act) {
  let isScheduled = false;
  return () => {
    if (isScheduled) return;
    isScheduled = true;
    requestAnimationFrame(() => {
      isScheduled = false;
      act();
    });
  };
}
