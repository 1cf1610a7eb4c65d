// Keeps a page as it is now: each message has the id of an element, a line break, and the element as it became.
(() => {
  'use strict';
  const sign = document.getElementById('live');
  if (!sign || !window.EventSource) return;
  let source = null, lost = null;
  const say = (text) => { if (sign.textContent !== text) sign.textContent = text; };
  const clock = () => new Date().toISOString().slice(11, 19);

  // Who has the focus in what is replaced keeps it.
  function replace(id, html) {
    const before = document.getElementById(id);
    if (!before) return;
    const template = document.createElement('template');
    template.innerHTML = html;
    const after = template.content.firstElementChild;
    if (!after) return;
    const focused = before.contains(document.activeElement) ? document.activeElement : null;
    const left = [...before.querySelectorAll('.scroll')].map((part) => part.scrollLeft);
    const open = new Set([...before.querySelectorAll('details[open][id]')].map((part) => part.id));
    before.replaceWith(after);
    after.querySelectorAll('.scroll').forEach((part, place) => { part.scrollLeft = left[place] || 0; });
    after.querySelectorAll('details[id]').forEach((part) => { if (open.has(part.id)) part.open = true; });
    if (!focused) return;
    const href = focused.getAttribute('href');
    const again = (focused.id && document.getElementById(focused.id))
      || (href && [...after.querySelectorAll('a')].find((link) => link.getAttribute('href') === href));
    if (again) again.focus({ preventScroll: true });
  }

  function connect() {
    if (source) return;
    source = new EventSource(sign.dataset.events);
    source.onopen = () => { lost = null; say('live'); };
    source.onmessage = (event) => {
      const end = event.data.indexOf('\n');
      replace(event.data.slice(0, end), event.data.slice(end + 1));
    };
    source.addEventListener('build', (event) => { if (event.data !== sign.dataset.build) location.reload(); });
    source.onerror = () => {
      lost = lost || clock();
      say('not connected since ' + lost + ' UTC, trying again');
      // A refusal ends an EventSource for good; this page goes on asking.
      if (source.readyState === EventSource.CLOSED) { disconnect(); setTimeout(connect, 3000); }
    };
  }
  function disconnect() { if (source) { source.close(); source = null; } }

  // Nobody looks: nobody is asked.
  document.addEventListener('visibilitychange', () => {
    if (document.hidden) { disconnect(); say('paused at ' + clock() + ' UTC'); } else connect();
  });
  addEventListener('pagehide', disconnect);
  addEventListener('pageshow', () => { if (!document.hidden) connect(); });
  connect();
})();
