// The playground: what the form says becomes a request of the API, and what the API streams becomes text.
// Whatever comes from a model or a server is put into the page as text, never as markup. Nothing is stored: the form is in the
// address's fragment, the key only in this page's memory.
"use strict";
(() => {
  const $ = (id) => document.getElementById(id);
  const page = $("playground");
  const root = page.dataset.root;
  const SIDES = ["a", "b"];
  const NAMES = { a: "A", b: "B" };
  const FRAGMENT_MAX = 16000;
  const LIKELIEST = 5;
  // Of the time between the first and the last token, for a speed to be shown.
  const MEASURED_SECONDS = 0.02;

  /* ---- Elements ---- */

  /** An element of a tag with classes (`div.answer.quiet`), members, and children: elements or text. */
  function make(what, members, ...children) {
    const [tag, ...classes] = what.split(".");
    const element = document.createElement(tag);
    element.className = classes.join(" ");
    for (const [name, value] of Object.entries(members || {})) {
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (name.includes("-") || name === "role" || name === "for") element.setAttribute(name, value);
      else element[name] = value;
    }
    element.append(...children.filter((child) => child !== null && child !== undefined));
    return element;
  }

  const button = (text, onclick, members) => make("button.plain", { type: "button", textContent: text, onclick, ...members });

  function note(kind, ...children) {
    return make(`div.note.${kind}`, {}, ...children);
  }

  function say(text) {
    $("status").textContent = text;
  }

  /* ---- The form ---- */

  const mode = () => (page.querySelector('[name="mode"]:checked') || {}).value || "chat";
  const comparing = () => $("compare").checked;
  const sides = () => (comparing() ? SIDES : ["a"]);
  const option = (name, side) => page.querySelector(`[data-option="${name}"][data-side="${side}"]`);
  const optionNames = [...page.querySelectorAll('[data-option][data-side="a"]')].map((input) => input.dataset.option);

  /** What is set for a side: what B leaves open is as for A. */
  function setting(name, side) {
    const own = option(name, side).value;
    return own === "" && side === "b" ? option(name, "a").value : own;
  }

  const isNumber = (name) => option(name, "a").type === "number";

  /** Options of a side as the API names them; what is left open is the model's. */
  function options(side) {
    const chosen = {};
    for (const name of optionNames) {
      const value = setting(name, side);
      if (value === "" || name === "system") continue;
      if (name === "stop") chosen.stop = value.split("\n").filter((line) => line !== "");
      else chosen[name] = isNumber(name) ? Number(value) : value;
    }
    return chosen;
  }

  /** The first field that says what cannot be sent. */
  function wrongField() {
    const fields = sides().flatMap((side) => optionNames.map((name) => option(name, side)));
    return [...fields, $("tools"), $("schema")].find((field) => !field.disabled && !field.checkValidity());
  }

  /* ---- JSON that people write ---- */

  /** A value, or where and why it is none: browsers say it differently, if at all. */
  function readJson(text) {
    try {
      return { value: JSON.parse(text) };
    } catch {
      const at = firstWrong(text);
      const before = text.slice(0, at).split("\n");
      const what = at >= text.length ? "the text ends too soon" : `${JSON.stringify(String.fromCodePoint(text.codePointAt(at)))} is not JSON here`;
      return { error: `Line ${before.length}, column ${before.at(-1).length + 1}: ${what}` };
    }
  }

  const SPACE = /[ \t\n\r]*/y, WORD = /true|false|null/y, NUMBER = /-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?/y;
  const STRING = /"(?:[^"\\\u0000-\u001f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*"/y;

  /** How far a text is JSON. */
  function firstWrong(text) {
    let at = 0;
    const take = (pattern) => {
      pattern.lastIndex = at;
      const found = pattern.test(text);
      if (found) at = pattern.lastIndex;
      return found;
    };
    const mark = (sign) => take(SPACE) && text[at] === sign && (at += 1) > 0;
    const many = (end, item) => {
      if (mark(end)) return true;
      do if (!item()) return false; while (mark(","));
      return mark(end);
    };
    const member = () => take(SPACE) && take(STRING) && mark(":") && value();
    const value = () => take(SPACE) && (take(STRING) || take(NUMBER) || take(WORD) || (mark("[") ? many("]", value) : mark("{") && many("}", member)));
    if (value()) take(SPACE);
    return at;
  }

  /** What is wrong with a list of tools; empty if nothing is. */
  function wrongTools(tools) {
    if (!Array.isArray(tools)) return "A list of tools is asked for: [{\"type\": \"function\", …}]";
    for (const [idx, tool] of tools.entries()) {
      if (!tool || tool.type !== "function") return `Tool ${idx + 1}: "type" must be "function"`;
      if (!tool.function || typeof tool.function.name !== "string") return `Tool ${idx + 1}: "function" needs a "name"`;
      const parameters = tool.function.parameters;
      if (parameters !== undefined && !isObject(parameters)) return `Tool ${idx + 1}: "parameters" must be a schema`;
    }
    return "";
  }

  const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

  /** Reads a field of JSON, marks it and says below it what is wrong, or `words(value)`. */
  function checkField(id, wrong, words) {
    const field = $(id), says = $(`${id}-says`);
    const text = field.value.trim();
    const read = text === "" ? {} : readJson(field.value);
    const error = read.error || (read.value !== undefined && wrong(read.value)) || "";
    field.setCustomValidity(error);
    field.setAttribute("aria-invalid", String(error !== ""));
    says.classList.toggle("bad", error !== "");
    says.textContent = error || (read.value === undefined ? "" : words(read.value));
    return error ? undefined : read.value;
  }

  function toolsOf() {
    if (mode() !== "chat") {
      $("tools").setCustomValidity("");
      return undefined;
    }
    return checkField("tools", wrongTools, (tools) => `${tools.length} ${tools.length === 1 ? "tool" : "tools"}: ${tools.map((tool) => tool.function.name).join(", ")}`);
  }

  function schemaOf() {
    if ($("structure").value !== "schema") {
      $("schema").setCustomValidity("");
      return undefined;
    }
    if ($("schema").value.trim() === "") {
      $("schema").setCustomValidity("Write a schema, or ask for text");
      return undefined;
    }
    return checkField("schema", (schema) => (isObject(schema) ? "" : "A schema is an object"), (schema) => {
      const unchecked = keywordsNotChecked(schema);
      return unchecked.length ? `JSON. Of the answer this page does not check: ${unchecked.join(", ")}` : "JSON; the answer is checked against all of it";
    });
  }

  /* ---- Schemas: what of JSON Schema an answer is checked against ---- */

  const CHECKED = new Set(["type", "properties", "required", "additionalProperties", "items", "prefixItems", "enum", "const", "minimum",
    "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength", "pattern", "minItems", "maxItems", "uniqueItems", "minProperties",
    "maxProperties", "patternProperties", "propertyNames", "anyOf", "oneOf", "allOf", "not", "if", "then", "else", "$ref"]);
  const SILENT = new Set(["$defs", "definitions", "$schema", "$id", "$comment", "title", "description", "default", "examples"]);
  const OF_NAMED = new Set(["properties", "patternProperties", "$defs", "definitions"]);
  const OF_MANY = new Set(["anyOf", "oneOf", "allOf", "prefixItems"]);
  const OF_ONE = new Set(["items", "additionalProperties", "propertyNames", "not", "if", "then", "else"]);

  /** Keywords in a schema that `violations` does not know. */
  function keywordsNotChecked(schema, found = new Set()) {
    if (!isObject(schema)) return [...found];
    for (const [name, value] of Object.entries(schema)) {
      if (!CHECKED.has(name) && !SILENT.has(name)) found.add(name);
      if (name === "$ref" && !isPointer(value)) found.add("$ref by a name");
      if (OF_NAMED.has(name) && isObject(value)) Object.values(value).forEach((part) => keywordsNotChecked(part, found));
      else if (OF_MANY.has(name) && Array.isArray(value)) value.forEach((part) => keywordsNotChecked(part, found));
      else if (OF_ONE.has(name)) keywordsNotChecked(value, found);
    }
    return [...found];
  }

  const kindOf = (value) => (value === null ? "null" : Array.isArray(value) ? "array" : typeof value);
  const isKind = (value, kind) => kindOf(value) === kind || (kind === "integer" && Number.isInteger(value));
  const isSame = (one, next) => canonical(one) === canonical(next);

  function canonical(value) {
    if (Array.isArray(value)) return `[${value.map(canonical)}]`;
    if (!isObject(value)) return JSON.stringify(value);
    return `{${Object.keys(value).sort().map((key) => `${JSON.stringify(key)}:${canonical(value[key])}`)}}`;
  }

  const isPointer = (ref) => ref === "#" || String(ref).startsWith("#/");

  /** What a pointer `#/a/b` leads to. */
  function followed(pointer, whole) {
    const steps = pointer.split("/").slice(1);
    const name = (step) => decodeURIComponent(step).replace(/~1/g, "/").replace(/~0/g, "~");
    return steps.reduce((schema, step) => (isObject(schema) || Array.isArray(schema) ? schema[name(step)] : undefined), whole);
  }

  /** Where and how a value is not as a schema wants it. */
  function violations(value, schema, whole = schema, at = "$", depth = 0) {
    if (schema === true || schema === undefined || depth > 64) return [];
    if (schema === false) return [`${at} must not be there`];
    if (!isObject(schema)) return [];
    const found = [];
    const deeper = (part, inner, where) => violations(part, inner, whole, where, depth + 1);
    const must = (holds, words) => holds || found.push(`${at} ${words}`);
    if (isPointer(schema.$ref)) found.push(...deeper(value, followed(schema.$ref, whole), at));
    if (schema.type !== undefined) {
      const kinds = [].concat(schema.type);
      must(kinds.some((kind) => isKind(value, kind)), `is ${kindOf(value)}, not ${kinds.join(" or ")}`);
    }
    if (schema.enum) must(schema.enum.some((one) => isSame(one, value)), `is none of ${schema.enum.map((one) => JSON.stringify(one)).join(", ")}`);
    if ("const" in schema) must(isSame(schema.const, value), `is not ${JSON.stringify(schema.const)}`);
    if (typeof value === "number") numberIn(value, schema, must);
    if (typeof value === "string") textIn(value, schema, must);
    if (Array.isArray(value)) found.push(...listIn(value, schema, must, deeper, at));
    if (isObject(value)) found.push(...objectIn(value, schema, must, deeper, at));
    (schema.allOf || []).forEach((part) => found.push(...deeper(value, part, at)));
    const fits = (parts) => parts.filter((part) => deeper(value, part, at).length === 0).length;
    if (schema.anyOf) must(fits(schema.anyOf) > 0, "fits none of anyOf");
    if (schema.oneOf) must(fits(schema.oneOf) === 1, `fits ${fits(schema.oneOf)} of oneOf, not one`);
    if ("not" in schema) must(fits([schema.not]) === 0, "fits what it must not");
    if ("if" in schema) found.push(...deeper(value, fits([schema.if]) ? schema.then : schema.else, at));
    return found;
  }

  function numberIn(value, schema, must) {
    if (schema.minimum !== undefined) must(value >= schema.minimum, `is less than ${schema.minimum}`);
    if (schema.maximum !== undefined) must(value <= schema.maximum, `is more than ${schema.maximum}`);
    if (schema.exclusiveMinimum !== undefined) must(value > schema.exclusiveMinimum, `is not more than ${schema.exclusiveMinimum}`);
    if (schema.exclusiveMaximum !== undefined) must(value < schema.exclusiveMaximum, `is not less than ${schema.exclusiveMaximum}`);
  }

  function textIn(value, schema, must) {
    const length = [...value].length;
    if (schema.minLength !== undefined) must(length >= schema.minLength, `is shorter than ${schema.minLength}`);
    if (schema.maxLength !== undefined) must(length <= schema.maxLength, `is longer than ${schema.maxLength}`);
    if (schema.pattern !== undefined) must(matches(schema.pattern, value), `does not match ${schema.pattern}`);
  }

  function matches(pattern, value) {
    try {
      return new RegExp(pattern, "u").test(value);
    } catch {
      return true; // Another dialect's: the server's business.
    }
  }

  function listIn(value, schema, must, deeper, at) {
    if (schema.minItems !== undefined) must(value.length >= schema.minItems, `has fewer than ${schema.minItems} items`);
    if (schema.maxItems !== undefined) must(value.length <= schema.maxItems, `has more than ${schema.maxItems} items`);
    if (schema.uniqueItems) must(new Set(value.map(canonical)).size === value.length, "has the same item twice");
    const first = schema.prefixItems || [];
    return value.flatMap((item, idx) => deeper(item, idx < first.length ? first[idx] : schema.items, `${at}[${idx}]`));
  }

  function objectIn(value, schema, must, deeper, at) {
    const own = (object, name) => Object.hasOwn(object || {}, name);
    (schema.required || []).forEach((name) => must(own(value, name), `lacks ${JSON.stringify(name)}`));
    const names = Object.keys(value);
    if (schema.minProperties !== undefined) must(names.length >= schema.minProperties, `has fewer than ${schema.minProperties} members`);
    if (schema.maxProperties !== undefined) must(names.length <= schema.maxProperties, `has more than ${schema.maxProperties} members`);
    return names.flatMap((name) => {
      const where = `${at}.${name}`;
      const patterns = Object.entries(schema.patternProperties || {}).filter(([pattern]) => matches(pattern, name)).map(([, part]) => part);
      const known = own(schema.properties, name) ? [schema.properties[name], ...patterns] : patterns;
      const asked = known.length ? known : [schema.additionalProperties];
      return [...asked.flatMap((part) => deeper(value[name], part, where)), ...deeper(name, schema.propertyNames, `the name ${where}`)];
    });
  }

  /* ---- Requests ---- */

  // A turn is what was said to the model and what each side answered: {input: {a: [messages], b: …}, answers: {a: answer, b: …}}.
  const talks = { chat: [], completion: [] };
  const turns = () => talks[mode()];

  /** Messages up to and with a turn, as a side saw them. Where it was not asked, it saw what the other did. */
  function history(turn, side) {
    const system = setting("system", side);
    const messages = system === "" ? [] : [{ role: "system", content: system }];
    let from = side;
    for (const one of turns().slice(0, turns().indexOf(turn))) {
      if (!toolTurn(one)) from = one.answers[side] ? side : other(side);
      const answer = one.answers[from];
      // A question that got no answer was not asked.
      if (!one.input[from] || !answer || isEmpty(answer)) continue;
      messages.push(...one.input[from], asMessage(answer));
    }
    return [...messages, ...turn.input[side]];
  }

  const other = (side) => (side === "a" ? "b" : "a");
  const isEmpty = (answer) => answer.text === "" && answer.calls.length === 0;

  function asMessage(answer) {
    const message = { role: "assistant", content: answer.text };
    if (answer.calls.length) message.tool_calls = answer.calls.map(({ id, name, args }) => ({ id, type: "function", function: { name, arguments: args } }));
    return message;
  }

  /** What is sent for a turn: path and body without the fields of streaming. */
  function request(turn, side) {
    const { model, ...chosen } = options(side);
    const body = model ? { model } : {};
    if (mode() === "chat") Object.assign(body, { messages: history(turn, side) });
    else Object.assign(body, { prompt: turn.input.a[0].content });
    Object.assign(body, chosen);
    if (mode() === "chat") addTools(body);
    if ($("structure").value === "json") body.response_format = { type: "json_object" };
    const schema = schemaOf();
    if (schema) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
    if ($("probabilities").checked) Object.assign(body, mode() === "chat" ? { logprobs: true, top_logprobs: LIKELIEST } : { logprobs: LIKELIEST });
    return { path: mode() === "chat" ? "v1/chat/completions" : "v1/completions", body, schema };
  }

  function addTools(body) {
    const tools = toolsOf();
    if (!tools || tools.length === 0) return;
    body.tools = tools;
    const choice = $("tool-choice").value;
    if (choice) body.tool_choice = choice;
  }

  const key = () => $("key").value.trim();

  function headers() {
    const sent = { "content-type": "application/json" };
    if (key() !== "") sent.authorization = `Bearer ${key()}`;
    return sent;
  }

  /** Events of a stream, parsed; ends at [DONE], and throws if the stream ends before it. */
  async function* events(body) {
    const reader = body.pipeThrough(new TextDecoderStream()).getReader();
    let held = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) throw new Broken("The stream ended before the answer did: the server, or something before it, went away.");
      held += value;
      const parts = held.split(/\r?\n\r?\n/);
      held = parts.pop();
      for (const part of parts) {
        const data = part.split(/\r?\n/).filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart()).join("\n");
        if (data === "[DONE]") return;
        if (data !== "") yield JSON.parse(data);
      }
    }
  }

  /** What went wrong, in words for people. */
  class Broken extends Error {
    constructor(message, status) {
      super(message);
      this.status = status;
    }
  }

  async function refusal(response) {
    const text = await response.text();
    const error = (readJson(text).value || {}).error || {};
    const words = error.message || `The server answered with status ${response.status}${text === "" ? "" : `: ${text.slice(0, 300)}`}`;
    const wait = response.headers.get("retry-after");
    return new Broken(words + (wait ? ` (try again in ${wait} s)` : ""), response.status);
  }

  const gone = "No answer from the server: it has stopped, or the network does not reach it. What you wrote is kept; send it again once it is back.";

  async function call(path, init) {
    let response;
    try {
      response = await fetch(root + path, { ...init, cache: "no-store", credentials: "same-origin" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Broken(gone);
    }
    if (!response.ok) throw await refusal(response);
    return response;
  }

  /* ---- Answers ---- */

  function newAnswer(turn, side) {
    const sent = request(turn, side);
    return { turn, side, sent, text: "", thoughts: "", calls: [], tokens: [], finish: null, usage: null, error: null,
      edited: false, chunks: 0, first: null, last: null, asked: performance.now(), stop: new AbortController() };
  }

  async function ask(turn, side) {
    const answer = newAnswer(turn, side);
    turn.answers[side] = answer;
    answer.view = new View(answer);
    placeTurn(turn);
    busy();
    try {
      const body = { ...answer.sent.body, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
      const init = { method: "POST", headers: headers(), body: JSON.stringify(body), signal: answer.stop.signal };
      const response = await call(answer.sent.path, init);
      for await (const chunk of events(response.body)) take(answer, chunk);
    } catch (error) {
      fail(answer, error);
    } finally {
      answer.ended = performance.now();
      answer.view.finish();
      busy();
    }
  }

  function fail(answer, error) {
    if (error.name === "AbortError") answer.finish = "stopped";
    else if (error instanceof Broken) answer.error = error;
    else answer.error = new Broken(error.name === "TypeError" ? "The connection broke before the answer was whole." : `This page could not read the answer: ${error.message}`);
    if (error.status === 401) $("key").focus();
  }

  /** One chunk of a stream. */
  function take(answer, chunk) {
    if (chunk.error) throw new Broken(chunk.error.message || "The server ended the answer with an error.");
    if (chunk.usage) answer.usage = chunk.usage;
    if (chunk.model) answer.model = chunk.model;
    const choice = (chunk.choices || [])[0];
    if (!choice) return;
    const delta = choice.delta || { content: choice.text };
    const said = delta.content || "", thought = delta.reasoning || delta.reasoning_content || "";
    if (said || thought || delta.tool_calls) {
      answer.chunks += 1;
      // How many tokens there were by then: marks of thoughts and calls are tokens that show nothing.
      answer.last = { at: performance.now(), tokens: answer.usage ? answer.usage.completion_tokens : answer.chunks };
      answer.first ??= answer.last;
    }
    answer.text += said;
    answer.thoughts += thought;
    (delta.tool_calls || []).forEach((part) => takeCall(answer, part));
    if (choice.finish_reason) answer.finish = choice.finish_reason;
    answer.view.take(said, tokensOf(answer, choice.logprobs));
  }

  function takeCall(answer, part) {
    const made = (answer.calls[part.index] ??= { id: "", name: "", args: "" });
    if (part.id) made.id = part.id;
    const { name, arguments: args } = part.function || {};
    if (name) made.name += name;
    if (args) made.args += args;
  }

  /** Tokens of a chunk with their probabilities. A character may take several tokens: its text is the last one's. */
  function tokensOf(answer, logprobs) {
    if (!logprobs) return [];
    if (logprobs.content) {
      answer.decoder ??= new TextDecoder();
      return logprobs.content.map(({ token, logprob, bytes, top_logprobs }) => ({
        text: bytes ? answer.decoder.decode(new Uint8Array(bytes), { stream: true }) : token, logprob,
        others: (top_logprobs || []).map((rival) => [rival.token, rival.logprob]) }));
    }
    return (logprobs.tokens || []).map((text, idx) => ({ text, logprob: logprobs.token_logprobs[idx],
      others: Object.entries((logprobs.top_logprobs || [])[idx] || {}).sort((one, next) => next[1] - one[1]) }));
  }

  /** How fast it was, as this browser saw it. */
  function measures(answer) {
    const facts = [];
    if (answer.first !== null) facts.push(["first token", `${Math.round(answer.first.at - answer.asked)} ms`]);
    const tokens = answer.usage ? answer.usage.completion_tokens : answer.chunks;
    const seconds = answer.first === null ? 0 : (answer.last.at - answer.first.at) / 1000;
    const since = seconds > 0 ? answer.last.tokens - answer.first.tokens : 0;
    // Tokens that came together in one piece say nothing of speed.
    if (since > 0 && seconds >= MEASURED_SECONDS) facts.push(["speed", `${rounded(since / seconds)} tokens/s`]);
    if (tokens > 0) facts.push(["length", `${answer.usage ? "" : "about "}${tokens} ${tokens === 1 ? "token" : "tokens"}`]);
    return facts;
  }

  const rounded = (value) => (value >= 100 ? Math.round(value) : value.toPrecision(2));
  const percent = (logprob) => {
    const share = Math.exp(logprob) * 100;
    return share >= 99.95 ? "100 %" : share < 0.1 ? "< 0.1 %" : `${share.toFixed(1)} %`;
  };

  const ENDINGS = { stop: "finished", length: "longest length reached", tool_calls: "calls a tool", stopped: "stopped by you", content_filter: "filtered" };

  /** An answer on the page. */
  class View {
    constructor(answer) {
      this.answer = answer;
      this.thoughts = make("pre");
      this.folded = make("details.thoughts", { hidden: true }, make("summary", {}, "Thoughts"), this.thoughts);
      this.text = make("div.text");
      this.calls = make("div.calls");
      this.after = make("div.after");
      this.facts = make("p.facts-line.quiet");
      this.asked = make("div");
      this.tools = make("div.tools");
      this.who = make("h3.who", {}, this.name());
      this.element = make("article.answer", { "aria-busy": "true", "aria-label": `Answer${comparing() ? ` ${NAMES[answer.side]}` : ""}` },
        this.who, this.folded, this.text, this.calls, this.after, make("div.foot", {}, this.facts, this.tools), this.asked);
      this.drawn = 0;
    }

    name() {
      const model = this.answer.model || this.answer.sent.body.model || "model";
      return comparing() ? `${NAMES[this.answer.side]} · ${model}` : model;
    }

    take(said, tokens) {
      const whole = tokens.map((token) => token.text).join("");
      if (tokens.length && (said === whole || said === "")) {
        // Text that is held back (half a character) comes with the token that completes it.
        if (said !== "") tokens.forEach((token) => this.text.append(this.token(token)));
      } else if (said !== "") this.text.append(document.createTextNode(said));
      this.schedule();
    }

    token(token) {
      const share = Math.exp(token.logprob);
      const bin = share > 0.95 ? 0 : share > 0.7 ? 1 : share > 0.4 ? 2 : share > 0.15 ? 3 : 4;
      const first = this.text.querySelector(".token") === null;
      const element = make(`span.token.p${bin}`, { textContent: token.text, tabIndex: first ? 0 : -1 });
      probabilities.set(element, token);
      return element;
    }

    /** At most once a frame: a fast model writes more often than anybody looks. */
    schedule() {
      if (this.pending) return;
      this.pending = requestAnimationFrame(() => this.draw());
    }

    draw() {
      this.pending = null;
      const { answer } = this;
      const near = window.innerHeight + window.scrollY > document.documentElement.scrollHeight - 160;
      this.who.textContent = this.name();
      this.folded.hidden = answer.thoughts === "";
      this.thoughts.textContent = answer.thoughts;
      this.calls.replaceChildren(...answer.calls.filter(Boolean).map((made) => this.call(made)));
      this.facts.textContent = measures(answer).map(([name, value]) => (name === "first token" ? `${name} ${value}` : value)).join(" · ");
      if (near && answer.ended === undefined) window.scrollTo({ top: document.documentElement.scrollHeight, behavior: "instant" });
    }

    call({ name, args }) {
      const read = readJson(args);
      const pretty = read.error ? args : JSON.stringify(read.value, null, 2);
      return make("div.call", {}, make("div.call-name", {}, make("span.quiet", {}, "calls "), make("code", {}, name)), make("pre", {}, pretty));
    }

    finish() {
      const { answer } = this;
      if (this.pending) cancelAnimationFrame(this.pending);
      this.draw();
      this.element.setAttribute("aria-busy", "false");
      const ending = answer.edited ? "changed by you" : ENDINGS[answer.finish] || answer.finish;
      if (ending) this.facts.append(this.facts.textContent === "" ? ending : ` · ${ending}`);
      if (this.text.querySelector(".token") === null) this.fences();
      this.after.replaceChildren(...this.checked(), ...this.failure());
      this.asked.replaceChildren(...this.results());
      this.tools.replaceChildren(...this.actions());
      const name = comparing() ? `Answer ${NAMES[answer.side]}` : "Answer";
      say(answer.error ? `${name}: ${answer.error.message}` : `${name}: ${answer.text.slice(0, 500) || ENDINGS[answer.finish] || "empty"}`);
    }

    /** Code between fences in the type of code. */
    fences() {
      const parts = this.answer.text.split(/^```[^\n]*\n?/m);
      const shown = parts.map((part, idx) => (idx % 2 ? make("pre", {}, part.replace(/\n$/, "")) : document.createTextNode(part)));
      this.text.replaceChildren(...shown);
    }

    /** Whether the answer, and what it calls with, is as the schema wants it. */
    checked() {
      const { answer } = this;
      const { schema, body } = answer.sent;
      const lines = [];
      if (schema && answer.text !== "") lines.push(verdict("The answer", answer.text, schema));
      for (const made of answer.calls.filter(Boolean)) {
        const tool = (body.tools || []).find((one) => one.function.name === made.name);
        lines.push(tool ? verdict(`The call of ${made.name}`, made.args, tool.function.parameters || {}) : note("bad", `There is no tool ${made.name}.`));
      }
      return lines;
    }

    failure() {
      const { answer } = this;
      return answer.error ? [note("bad", make("p", {}, answer.error.message), button("Try again", () => again(answer)))] : [];
    }

    /** Fields for what the tools gave back. */
    results() {
      const { answer } = this;
      const calls = answer.calls.filter(Boolean);
      if (calls.length === 0 || answer.error || turns().at(-1) !== answer.turn) return [];
      const fields = calls.map((made, idx) => {
        const id = `result-${answer.side}-${turns().length}-${idx}`;
        return make("div.field", {}, make("label", { for: id }, `What ${made.name} gives back`), make("textarea.mono", { id, rows: 2 }));
      });
      const send = () => sendResults(answer, fields.map((field) => field.querySelector("textarea").value));
      return [make("form.results", { onsubmit: (event) => { event.preventDefault(); send(); } }, ...fields, make("button", { type: "submit" }, "Send results"))];
    }

    actions() {
      const { answer } = this;
      return [
        button("Copy", (event) => copy(answer.text || JSON.stringify(answer.calls, null, 2), event.target)),
        button("Edit", () => editAnswer(answer)),
        button("Again", () => again(answer)),
        button("Code", () => showCode(answer.sent)),
      ];
    }
  }

  function verdict(what, text, schema) {
    const read = readJson(text);
    const wrong = read.error ? [`it is not JSON: ${read.error}`] : violations(read.value, schema);
    if (wrong.length === 0) {
      const unchecked = keywordsNotChecked(schema);
      return make("p.verdict.good", {}, `${what} fits its schema${unchecked.length ? ` (not checked: ${unchecked.join(", ")})` : ""}.`);
    }
    return note("bad", make("p", {}, `${what} does not fit its schema:`), make("ul", {}, ...wrong.slice(0, 8).map((line) => make("li", {}, line))));
  }

  /* ---- Probabilities ---- */

  const probabilities = new WeakMap();
  const tip = $("tip");

  function showTip(element) {
    const token = probabilities.get(element);
    const others = token.others.map(([text, logprob]) => make(text === token.text ? "tr.chosen" : "tr", {},
      make("td", {}, make("code", {}, visible(text))), make("td.num", {}, percent(logprob))));
    tip.replaceChildren(make("p", {}, make("code", {}, visible(token.text)), ` ${percent(token.logprob)}`), make("table", {}, make("tbody", {}, ...others)));
    tip.hidden = false;
    tipped = element;
    element.setAttribute("aria-describedby", "tip");
    placeTip();
  }

  let tipped = null;

  /** Beside its token, also while the page is scrolled. */
  function placeTip() {
    if (tip.hidden || !tipped) return;
    const element = tipped;
    const box = element.getClientRects()[0] || element.getBoundingClientRect(), own = tip.getBoundingClientRect();
    const below = box.bottom + own.height + 8 < window.innerHeight;
    tip.style.left = `${Math.max(8, Math.min(box.left, document.documentElement.clientWidth - own.width - 8))}px`;
    tip.style.top = `${below ? box.bottom + 4 : box.top - own.height - 4}px`;
  }

  const visible = (text) => text.replace(/ /g, "␣").replace(/\n/g, "⏎").replace(/\t/g, "⇥") || "∅";

  function hideTip(element) {
    tip.hidden = true;
    tipped = null;
    if (element) element.removeAttribute("aria-describedby");
  }

  function stepToken(event) {
    const element = event.target;
    if (!element.classList || !element.classList.contains("token")) return;
    const all = [...element.parentElement.querySelectorAll(".token")];
    const step = { ArrowRight: 1, ArrowLeft: -1, Home: -all.length, End: all.length }[event.key];
    if (event.key === "Escape") hideTip(element);
    if (step === undefined) return;
    event.preventDefault();
    const next = all[Math.max(0, Math.min(all.length - 1, all.indexOf(element) + step))];
    element.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }

  /* ---- Turns on the page ---- */

  const toolTurn = (turn) => turn.input.a === undefined || turn.input.a[0].role === "tool";

  /** Puts a turn, its question and its answers where they belong. */
  function placeTurn(turn) {
    turn.element ??= make("li.turn");
    const answers = SIDES.filter((side) => turn.answers[side]).map((side) => turn.answers[side].view.element);
    turn.element.replaceChildren(question(turn), make(`div.answers${answers.length > 1 ? ".two" : ""}`, {}, ...answers));
    if (!turn.element.isConnected) $("turns").append(turn.element);
    $("welcome").hidden = turns().length > 0;
  }

  function question(turn) {
    const [message] = Object.values(turn.input)[0];
    const label = toolTurn(turn) ? "Results" : mode() === "chat" ? "You" : "Prompt";
    const text = make("div.text", {}, Object.values(turn.input)[0].map((one) => one.content).join("\n"));
    const foot = toolTurn(turn) ? [] : [make("div.foot", {}, make("div.tools", {}, button("Edit", () => editQuestion(turn, message.content)), button("Copy", (event) => copy(message.content, event.target))))];
    return make("article.question", { "aria-label": label }, make("h3.who", {}, label), text, ...foot);
  }

  function editor(label, text, send, verb) {
    const field = make("textarea", { value: text, rows: Math.min(12, text.split("\n").length + 1), "aria-label": label });
    const form = make("form.editor", {}, field, make("div.row", {}, make("button.first", { type: "submit" }, verb), button("Cancel", () => redraw())));
    form.addEventListener("submit", (event) => { event.preventDefault(); send(field.value); });
    field.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); form.requestSubmit(); }
      if (event.key === "Escape") { event.stopPropagation(); redraw(); }
    });
    return { form, field };
  }

  function editQuestion(turn, text) {
    stop();
    const { form, field } = editor("Edit and send again; what follows is asked anew", text, (changed) => resend(turn, changed), "Send");
    turn.element.querySelector(".question").append(form);
    turn.element.querySelector(".question .text").hidden = true;
    turn.element.querySelector(".question .foot").hidden = true;
    field.focus();
  }

  function editAnswer(answer) {
    const { view } = answer;
    const keep = (changed) => {
      Object.assign(answer, { text: changed, edited: true, finish: "stop" });
      view.text.replaceChildren();
      view.finish();
      redraw();
    };
    const { form, field } = editor("Edit the answer; what you ask next builds on it", answer.text, keep, "Keep");
    view.text.hidden = true;
    view.tools.replaceChildren();
    view.text.after(form);
    field.focus();
  }

  /** As things are, without open editors. */
  function redraw() {
    page.querySelectorAll(".editor").forEach((form) => form.remove());
    page.querySelectorAll(".answer .text").forEach((text) => { text.hidden = false; });
    turns().forEach((turn) => {
      SIDES.forEach((side) => turn.answers[side] && turn.answers[side].ended !== undefined && turn.answers[side].view.tools.replaceChildren(...turn.answers[side].view.actions()));
      placeTurn(turn);
    });
  }

  /** Forgets what follows a turn. */
  function cutAfter(turn) {
    turns().splice(turns().indexOf(turn) + 1).forEach((later) => later.element.remove());
  }

  function resend(turn, text) {
    if (!allowed()) return;
    stop();
    const messages = [{ role: "user", content: text }];
    turn.input = { a: messages, b: messages };
    turn.answers = {};
    cutAfter(turn);
    placeTurn(turn);
    sides().forEach((side) => ask(turn, side));
  }

  function again(answer) {
    if (!allowed()) return;
    answer.stop.abort();
    cutAfter(answer.turn);
    ask(answer.turn, answer.side);
  }

  function send() {
    const text = $("draft").value;
    if (text.trim() === "" || running().length || !allowed()) return;
    const messages = [{ role: "user", content: text }];
    const turn = { input: { a: messages, b: messages }, answers: {} };
    turns().push(turn);
    $("draft").value = "";
    grow();
    placeTurn(turn);
    window.scrollTo({ top: document.documentElement.scrollHeight, behavior: "instant" });
    remember();
    sides().forEach((side) => ask(turn, side));
  }

  function sendResults(answer, results) {
    if (running().length || !allowed()) return;
    const messages = answer.calls.filter(Boolean).map(({ id }, idx) => ({ role: "tool", tool_call_id: id, content: results[idx] }));
    const turn = { input: { [answer.side]: messages }, answers: {} };
    turns().push(turn);
    answer.view.asked.replaceChildren();
    placeTurn(turn);
    ask(turn, answer.side);
  }

  /** Whether the form can be sent; if not, the field that is wrong is shown. */
  function allowed() {
    toolsOf();
    schemaOf();
    const wrong = wrongField();
    if (!wrong) return true;
    for (let around = wrong.closest("details"); around; around = around.parentElement.closest("details")) around.open = true;
    wrong.reportValidity();
    return false;
  }

  const running = () => Object.values(talks).flat().flatMap((turn) => Object.values(turn.answers)).filter((answer) => answer.ended === undefined);

  function stop() {
    running().forEach((answer) => answer.stop.abort());
  }

  function busy() {
    const on = running().length > 0;
    if (on) say("The answer is being written.");
    $("stop").hidden = !on;
    $("send").hidden = on;
  }

  /* ---- Code to copy ---- */

  const shellQuoted = (text) => `'${text.replace(/'/g, "'\\''")}'`;
  const indented = (text, by) => text.replace(/\n/g, `\n${by}`);

  /** A value as Python writes it. JSON's texts are Python's, too. */
  function python(value, by = "") {
    if (value === null) return "None";
    if (typeof value === "boolean") return value ? "True" : "False";
    if (!isObject(value) && !Array.isArray(value)) return JSON.stringify(value);
    const deeper = `${by}    `;
    const parts = Array.isArray(value)
      ? value.map((part) => python(part, deeper))
      : Object.entries(value).map(([name, part]) => `${JSON.stringify(name)}: ${python(part, deeper)}`);
    const [open, close] = Array.isArray(value) ? "[]" : "{}";
    return parts.length ? `${open}\n${deeper}${parts.join(`,\n${deeper}`)},\n${by}${close}` : open + close;
  }

  // What the official client takes as arguments; the rest goes into `extra_body`.
  const OF_OPENAI = new Set(["model", "messages", "prompt", "temperature", "top_p", "presence_penalty", "frequency_penalty", "max_tokens", "seed", "stop",
    "tools", "tool_choice", "response_format", "logprobs", "top_logprobs", "reasoning_effort"]);

  const CODE = {
    curl: ({ path, body }) => [`curl ${shellQuoted(new URL(root + path, location.href).href)} \\`,
      ...(key() === "" ? [] : ['  -H "authorization: Bearer $API_KEY" \\']), "  -H 'content-type: application/json' \\",
      `  -d ${shellQuoted(JSON.stringify(body, null, 2))}`].join("\n"),
    python: ({ path, body }) => {
      const base = new URL(`${root}v1`, location.href).href;
      const chat = path.endsWith("chat/completions");
      const taken = (name) => OF_OPENAI.has(name) && !(name === "response_format" && !chat);
      const known = Object.entries(body).filter(([name]) => taken(name));
      const extra = Object.fromEntries(Object.entries(body).filter(([name]) => !taken(name)));
      if (!body.model) known.unshift(["model", $("models-known").textContent || "model"]);
      const lines = known.map(([name, value]) => `    ${name}=${python(value, "    ")},`);
      if (Object.keys(extra).length) lines.push(`    extra_body=${python(extra, "    ")},`);
      return [key() === "" ? "" : "import os\n", "from openai import OpenAI\n",
        `client = OpenAI(base_url=${JSON.stringify(base)}, api_key=${key() === "" ? '"none"' : 'os.environ["API_KEY"]'})`,
        `answer = client.${chat ? "chat.completions" : "completions"}.create(`, ...lines, ")",
        chat ? "print(answer.choices[0].message.content or answer.choices[0].message.tool_calls)" : "print(answer.choices[0].text)"].filter((line) => line !== "").join("\n");
    },
    javascript: ({ path, body }) => [`const response = await fetch(${JSON.stringify(new URL(root + path, location.href).href)}, {`, '  method: "POST",',
      `  headers: { "content-type": "application/json"${key() === "" ? "" : ", authorization: `Bearer ${process.env.API_KEY}`"} },`,
      `  body: JSON.stringify(${indented(JSON.stringify(body, null, 2), "  ")}),`, "});", "const answer = await response.json();",
      `console.log(${path.endsWith("chat/completions") ? "answer.choices[0].message" : "answer.choices[0].text"});`].join("\n"),
  };

  let shown = null;

  function showCode(sent) {
    shown = sent;
    const language = page.querySelector('[name="language"]:checked').value;
    $("code").textContent = CODE[language](sent);
    if (!$("code-dialog").open) $("code-dialog").showModal();
  }

  /** The request that the form would send now. */
  function showNext() {
    if (!allowed()) return;
    const draft = $("draft").value;
    const last = turns().at(-1);
    if (draft.trim() === "" && last) return showCode((last.answers.a || last.answers.b).sent);
    const messages = [{ role: "user", content: draft }];
    const turn = { input: { a: messages, b: messages }, answers: {} };
    turns().push(turn);
    const sent = request(turn, "a");
    turns().pop();
    return showCode(sent);
  }

  async function copy(text, from) {
    const words = from.textContent;
    try {
      await navigator.clipboard.writeText(text);
      from.textContent = "Copied";
      say("Copied");
    } catch {
      // Without TLS a page may not write the clipboard by itself; the old way may.
      const held = make("textarea.hidden", { value: text, "aria-hidden": "true" });
      (from.closest("dialog") || document.body).append(held);
      held.select();
      from.textContent = document.execCommand("copy") ? "Copied" : "Cannot copy here";
      held.remove();
      from.focus();
    }
    setTimeout(() => { from.textContent = words; }, 1500);
  }

  /* ---- The form in the address ---- */

  const KEPT = ["draft", "tools", "tool-choice", "structure", "schema"];
  const SWITCHES = ["compare", "probabilities"];

  function formState() {
    const state = {};
    if (mode() !== "chat") state.mode = mode();
    SWITCHES.forEach((id) => { if ($(id).checked) state[id] = 1; });
    KEPT.forEach((id) => { if ($(id).value !== "") state[id] = $(id).value; });
    // Who gets the address wants to see what was asked.
    const last = turns().findLast((turn) => !toolTurn(turn));
    if (!state.draft && last) state.draft = last.input.a[0].content;
    SIDES.forEach((side) => optionNames.forEach((name) => { if (option(name, side).value !== "") state[`${side}.${name}`] = option(name, side).value; }));
    return state;
  }

  let pendingMemory = 0;

  function remember() {
    clearTimeout(pendingMemory);
    pendingMemory = setTimeout(() => {
      const state = formState();
      const fragment = Object.keys(state).length ? `#${encodeURIComponent(JSON.stringify(state))}` : "";
      if (fragment.length <= FRAGMENT_MAX) setFragment(fragment);
    }, 300);
  }

  const setFragment = (fragment) => window.history.replaceState(null, "", fragment || location.pathname + location.search);

  /** What an address says, as far as it is a form's; anything else in it is nothing. */
  function recall() {
    let state;
    try {
      state = JSON.parse(decodeURIComponent(location.hash.slice(1)));
    } catch {
      return;
    }
    if (!isObject(state)) return;
    const text = (name) => (typeof state[name] === "string" ? state[name] : "");
    const chosen = page.querySelector(`[name="mode"][value="${state.mode === "completion" ? "completion" : "chat"}"]`);
    chosen.checked = true;
    SWITCHES.forEach((id) => { $(id).checked = state[id] === 1; });
    KEPT.forEach((id) => { if (text(id) !== "") $(id).value = text(id); });
    SIDES.forEach((side) => optionNames.filter((name) => name !== "model").forEach((name) => { option(name, side).value = text(`${side}.${name}`); }));
    wantedModels = { a: text("a.model"), b: text("b.model") };
    ["tools", "schema"].filter((id) => text(id) !== "").forEach((id) => { $(id).closest("details").open = true; });
  }

  /* ---- Models ---- */

  let wantedModels = { a: "", b: "" };

  async function listModels() {
    $("server-says").replaceChildren();
    try {
      const { data } = await (await call("v1/models", { headers: headers() })).json();
      const names = (Array.isArray(data) ? data : []).map((model) => String(model.id));
      SIDES.forEach((side) => fillModels(option("model", side), names, side));
      $("models-known").textContent = names[0] || "";
      $("welcome-model").textContent = names.length === 1 ? names[0] : names.length ? "a model" : "no model yet";
    } catch (error) {
      const locked = error.status === 401;
      const words = locked ? "This server asks for an API key: write it below. It stays in this page's memory." : error.message || String(error);
      $("server-says").append(note(locked ? "wait" : "bad", make("p", {}, words), locked ? null : button("Look again", listModels)));
      if (locked) $("key-part").open = true;
    }
  }

  function fillModels(list, names, side) {
    const before = list.value || wantedModels[side];
    const open = side === "b" ? [make("option", { value: "", textContent: "as A" })] : [];
    list.replaceChildren(...open, ...names.map((name) => make("option", { value: name, textContent: name })));
    if (names.includes(before)) list.value = before;
  }

  /* ---- Wiring ---- */

  function grow() {
    const draft = $("draft");
    draft.style.height = "auto";
    draft.style.height = `${Math.min(draft.scrollHeight + 2, window.innerHeight * 0.4)}px`;
  }

  /** The page as its form says: chat or completion, one side or two, structure or none. */
  function arrange() {
    page.classList.toggle("comparing", comparing());
    page.querySelectorAll("[data-of]").forEach((part) => { part.hidden = part.dataset.of !== mode(); });
    page.querySelectorAll('[data-side="b"]').forEach((field) => { field.disabled = !comparing(); });
    $("schema-part").hidden = $("structure").value !== "schema";
    $("draft").placeholder = mode() === "chat" ? "Write a message" : "Write the beginning of a text";
    $("draft-label").textContent = mode() === "chat" ? "Message" : "Prompt";
    optionNames.filter((name) => name !== "model").forEach((name) => { option(name, "b").placeholder = option(name, "a").value; });
    $("tool-choice").disabled = !toolsOf();
    schemaOf();
  }

  function changeMode() {
    stop();
    $("turns").replaceChildren(...turns().map((turn) => turn.element));
    $("welcome").hidden = turns().length > 0;
    arrange();
  }

  function wire() {
    $("composer").addEventListener("submit", (event) => { event.preventDefault(); send(); });
    $("draft").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
    });
    $("draft").addEventListener("input", grow);
    document.addEventListener("keydown", (event) => { if (event.key === "Escape" && !$("code-dialog").open) stop(); });
    $("stop").addEventListener("click", () => { stop(); $("draft").focus(); });
    $("show-code").addEventListener("click", showNext);
    $("clear").addEventListener("click", () => { stop(); talks[mode()] = []; changeMode(); $("draft").focus(); });
    $("copy-code").addEventListener("click", (event) => copy($("code").textContent, event.target));
    $("close-code").addEventListener("click", () => $("code-dialog").close());
    page.querySelectorAll('[name="language"]').forEach((one) => one.addEventListener("change", () => showCode(shown)));
    page.querySelectorAll('[name="mode"]').forEach((one) => one.addEventListener("change", changeMode));
    page.querySelectorAll("[data-try]").forEach((one) => one.addEventListener("click", () => { $("draft").value = one.textContent; send(); }));
    $("settings").addEventListener("input", arrange);
    page.addEventListener("input", (event) => { if (event.target.id !== "key") remember(); });
    $("key").addEventListener("change", listModels);
    $("turns").addEventListener("mouseover", (event) => { if (probabilities.has(event.target)) showTip(event.target); });
    $("turns").addEventListener("mouseout", (event) => hideTip(probabilities.has(event.target) ? event.target : null));
    $("turns").addEventListener("focusin", (event) => { if (probabilities.has(event.target)) showTip(event.target); });
    $("turns").addEventListener("focusout", (event) => hideTip(probabilities.has(event.target) ? event.target : null));
    $("turns").addEventListener("keydown", stepToken);
    window.addEventListener("scroll", placeTip, { passive: true });
    // Another form's address in the same tab.
    window.addEventListener("hashchange", () => location.reload());
    const wide = window.matchMedia("(min-width: 960px)");
    const fold = () => { $("settings").open = wide.matches; };
    wide.addEventListener("change", fold);
    fold();
  }

  $("base").textContent = new URL(`${root}v1`, location.href).href;
  wire();
  recall();
  arrange();
  grow();
  listModels();
  if (window.matchMedia("(min-width: 960px)").matches) $("draft").focus();
})();
