"use strict";
// A client of the server's own API. Whatever a model says is put in as text, never as HTML.

const $ = (id) => document.getElementById(id);
const LABELS = { first: "draft", second: "second draft", lookup: "earlier text" };
Object.assign(LABELS, { said: "said before", forced: "grammar", target: "not guessed" });
const REFRESH = 5000, KEY = "dflash-key"; // in the storage of this tab
const RACE = { temperature: 0, max_tokens: 200, lookup_in: "conversation" }; // not the other side's
const BROKEN = "The answer broke off. Is the server still running?";
const STREAM = { // what all requests have
  stream: true, stream_options: { include_usage: true }, return_drafts: true, return_progress: true,
};

let talk = []; // the conversation, as it is sent
let running = null, asking = null; // AbortController of an answer; the key that is asked for
let models = {}; // by name

const make = (tag, kind, text = "") =>
  Object.assign(document.createElement(tag), { className: kind, textContent: text });
const tell = (text, kind = "") => Object.assign($("status"), { textContent: text, className: kind });
const log = $("log"), atEnd = () => log.scrollHeight - log.scrollTop - log.clientHeight < 60;

// The server
class Refused extends Error {}

function askKey(why) { // whether there is one now
  $("refused").textContent = why;
  $("lock").returnValue = $("key").value = "";
  $("lock").showModal();
  return new Promise((resolve) => {
    $("lock").onclose = () => {
      if ($("lock").returnValue) sessionStorage.setItem(KEY, $("key").value);
      asking = null;
      resolve(Boolean($("lock").returnValue));
    };
  });
}

async function call(path, options = {}) {
  const key = sessionStorage.getItem(KEY), headers = { "Content-Type": "application/json" };
  if (key) headers.Authorization = `Bearer ${key}`;
  const response = await fetch(path, { ...options, headers }).catch((error) => {
    if (error.name === "AbortError") throw error;
    throw new Refused("The server does not answer. Is it still running?");
  });
  if (response.ok) return response;
  if (response.status === 401) {
    asking ??= askKey(key ? "That key was refused." : "");
    if (await asking) return call(path, options);
    throw new Refused("This server needs its key. Send something, and it is asked for again.");
  }
  const told = await response.json().catch(() => ({}));
  throw new Refused(told.error?.message ?? `The server answered with status ${response.status}.`);
}

async function* eventsOf(asked, signal) {
  const body = JSON.stringify({ ...STREAM, ...asked });
  const response = await call("/v1/chat/completions", { method: "POST", body, signal });
  if (!response.body?.getReader) {
    throw new Refused("This browser cannot read streams. Please use a newer one.");
  }
  const reader = response.body.getReader(), decoder = new TextDecoder();
  for (let rest = ""; ; ) {
    const { value, done } = await reader.read();
    const lines = (rest + decoder.decode(value, { stream: !done })).split("\n");
    rest = lines.pop();
    for (const line of lines.filter((each) => each.startsWith("data: "))) {
      if (line === "data: [DONE]") return;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new Refused(event.error.message);
      yield event;
    }
    if (done) throw new Refused(BROKEN);
  }
}

// An answer as it grows
function blocksOf(text) { // words and code in turn
  const found = [[]];
  let fence = ""; // that has to be closed
  for (const line of text.split("\n")) {
    const [, mark, rest] = line.match(/^ {0,3}(`{3,}|~{3,})([^`]*)$/) ?? [];
    if (mark && (fence ? mark.startsWith(fence) && !rest.trim() : true)) {
      fence = fence ? "" : mark;
      found.push([]);
    } else found.at(-1).push(line);
  }
  return found.map((lines) => lines.join("\n"));
}

class Answer { // text, and the same in the colours of its sources
  constructor(parent) {
    this.text = this.thought = this.finish = "";
    this.tint = make("p", "tint");
    this.thoughts = make("details", "thought");
    this.words = make("div", "words");
    this.thoughts.append(make("summary", "", "Thoughts"), make("p", ""));
    this.thoughts.hidden = true;
    for (const each of [this.tint, this.words, this.thoughts.lastChild]) each.dir = "auto";
    parent.append(this.tint, this.thoughts, this.words);
    this.decoder = new TextDecoder(); // a character may be several tokens
  }

  take(event) {
    const choice = event.choices?.[0];
    this.text += choice?.delta.content ?? "";
    this.thought += choice?.delta.reasoning_content ?? "";
    this.finish = choice?.finish_reason ?? this.finish;
    event.dflash?.drafts?.forEach((each) => each.tokens.forEach((one) => this.addToken(...one)));
    this.frame ??= requestAnimationFrame(() => this.draw());
  }

  addToken(source, bytes) {
    const text = this.decoder.decode(new Uint8Array(bytes), { stream: true });
    if (text) this.tint.append(make("span", source, text));
  }

  draw() {
    const follow = atEnd(), blocks = blocksOf(this.text);
    this.frame = null;
    this.thoughts.hidden = !this.thought;
    this.thoughts.lastChild.textContent = this.thought;
    blocks.forEach((block, i) => {
      const node = this.words.children[i] ?? make(i % 2 ? "pre" : "p", "");
      const text = i % 2 ? block : block.replace(/^\n+|\s+$/g, "");
      if (i % 2) node.tabIndex = 0; // so that keys scroll it
      if (!node.parentNode) this.words.append(node);
      if (node.textContent !== text) node.textContent = text;
    });
    [...this.words.children].slice(blocks.length).forEach((each) => each.remove());
    if (follow) log.scrollTop = log.scrollHeight;
  }
}

// Figures
class Figures { // of one answer, live, and in the end the server's own
  constructor() {
    Object.assign(this, { rounds: 0, tokens: 0, drafted: 0, accepted: 0, begun: 0, head: 0, most: 0 });
    for (const id of ["rounds", "legend", "method"]) $(id).replaceChildren();
    for (const id of ["speed", "length", "rate", "first", "context"]) $(id).textContent = "–";
  }

  take(event) {
    const told = event.dflash ?? {}, read = told.prompt_progress;
    if (read) tell(`Reading: ${read.processed} of ${read.total} tokens`);
    if (told.drafts && !this.rounds) tell("Answering");
    told.drafts?.forEach((each) => this.addRound(each));
    if (told.drafts) this.show(this.live);
    if (told.method) this.end(told);
    const most = models[event.model]?.context_length ?? "?";
    if (event.usage) $("context").textContent = `${event.usage.total_tokens} of ${most} tokens`;
  }

  addRound({ drafted, accepted, tokens }) {
    [this.rounds, this.tokens] = [this.rounds + 1, this.tokens + tokens.length];
    [this.drafted, this.accepted] = [this.drafted + drafted, this.accepted + accepted];
    if (!this.begun) [this.begun, this.head] = [performance.now(), tokens.length];
    const bar = make("div", "");
    for (const [source] of tokens) {
      bar.prepend(make("span", source));
      const known = $("legend").querySelector(`.${source}`);
      if (!known) $("legend").append(make("li", source, LABELS[source] ?? source));
    }
    const rounds = $("rounds"); // the newest that have room, all as high as the longest allows
    rounds.style.setProperty("--most", (this.most = Math.max(this.most, tokens.length)));
    rounds.append(bar);
    while (rounds.scrollWidth > rounds.clientWidth) rounds.firstChild.remove();
  }

  get live() {
    const seconds = (performance.now() - this.begun) / 1000 || 1;
    return {
      tokens_per_second: (this.tokens - this.head) / seconds,
      acceptance_length: this.tokens / this.rounds,
      acceptance_rate: this.accepted / this.drafted,
    };
  }

  show({ tokens_per_second: speed, acceptance_length: length, acceptance_rate: rate }) {
    $("speed").textContent = speed ? speed.toFixed(1) : "–";
    $("length").textContent = length.toFixed(2);
    $("rate").textContent = this.drafted ? `${(100 * rate).toFixed(0)} %` : "no drafts";
    $("rounds").ariaLabel = `Tokens of each round, ${length.toFixed(2)} on average`;
  }

  end(told) {
    this.show((this.told = told));
    $("first").textContent = `${told.time_to_first_token.toFixed(2)} s`;
    const from = Object.entries(told.accepted_from ?? {})
      .map(([name, count]) => `; ${count} tokens accepted (${LABELS[name] ?? name})`).join("");
    const parked = told.parked ? `. Without drafts at times. ${told.parked}` : "";
    $("method").textContent = `Method ${told.method}${from}${parked}`;
  }
}

async function showServer() {
  if (!$("server").open || document.hidden) return;
  const page = await (await call("/metrics")).text().catch(() => "");
  const of = (name) => page.split("\n").filter((line) => line.match(`^dflash_${name}[ {]`))
    .reduce((sum, line) => sum + Number(line.slice(line.lastIndexOf(" "))), 0);
  const share = (part, whole) => `${((100 * of(part)) / (of(whole) || 1)).toFixed(0)} %`;
  const rows = [
    ["answering now", of("decoding")], ["requests waiting", of("waiting")],
    ["answers so far", of("answers_total")], ["tokens so far", of("tokens_total")],
    ["drafts accepted so far", share("accepted_total", "drafted_total")],
    ["prompt tokens reused", share("cached_tokens_total", "prompt_tokens_total")],
    ["memory", `${(of("memory_bytes") / 1e9).toFixed(2)} GB`],
  ];
  $("counts").replaceChildren(...rows.map((row) => {
    const node = make("div", "");
    node.append(make("dt", "", row[0]), make("dd", "", row[1]));
    return node;
  }));
}

async function showModels() {
  const { data } = await (await call("/v1/models")).json();
  models = Object.fromEntries(data.map((each) => [each.id, each]));
  const chosen = $("model").value;
  $("model").replaceChildren(...data.map(({ id, state }) => {
    const option = make("option", "", state === "loaded" ? id : `${id} (loads when asked)`);
    option.value = id;
    return option;
  }));
  if (chosen in models) $("model").value = chosen;
}

// What one can do
function article(kind, title) {
  const node = make("article", kind);
  node.append(make("h2", "", title));
  log.append(node);
  log.scrollTop = log.scrollHeight;
  return node;
}

async function run(work, node) { // one at a time; whether it came to its end
  running = new AbortController();
  node.setAttribute("aria-busy", "true"); // is read out when it is complete
  document.body.classList.add("busy");
  tell("Answering");
  try {
    await work(running.signal);
    tell("Done");
    return true;
  } catch (error) {
    const stopped = error.name === "AbortError", why = error instanceof Refused && error.message;
    tell(stopped ? "Stopped" : why || BROKEN, stopped ? "" : "error");
    return stopped;
  } finally {
    running = null;
    node.removeAttribute("aria-busy");
    document.body.classList.remove("busy");
    $("words").focus();
    Promise.all([showModels(), showServer()]).catch(() => {});
  }
}

async function send() {
  const text = $("words").value;
  if (running || !text.trim()) return;
  $("words").value = "";
  const model = $("model").value, asked = article("user", "You"), node = article("model", model);
  asked.append(Object.assign(make("p", "", text), { dir: "auto" }));
  const answer = new Answer(node), figures = new Figures();
  const messages = [...talk, { role: "user", content: contentOf(text, asked) }];
  const ended = await run(async (signal) => {
    for await (const event of eventsOf({ model, messages }, signal)) {
      answer.take(event);
      figures.take(event);
    }
  }, node);
  answer.draw();
  const notes = { length: "Cut: it may not be longer.", "": ended ? "Stopped." : "Not finished." };
  if (answer.finish in notes) node.append(make("p", "note", notes[answer.finish]));
  if (answer.text) talk = [...messages, { role: "assistant", content: answer.text }];
  else if (!answer.finish) { // nothing was said: the question goes back to where it was typed
    [asked, node].forEach((each) => each.remove());
    giveBack(messages.at(-1).content);
    $("words").value = $("words").value || text;
  }
}

async function race() {
  const text = $("words").value.trim() || textOf(talk.findLast((each) => each.role === "user")?.content);
  if (running || !text) return tell("Type a question first; the race answers it twice.");
  const node = article("race", `Race: ${text}`), sides = make("div", "sides");
  node.append(sides);
  const model = $("model").value, messages = [{ role: "user", content: text }];
  const body = { model, messages, ...RACE };
  const ran = ["Plain: one token a pass", "Drafts: several a pass"].map((title) => {
    const side = make("section", "side"), clock = make("p", "clock", "waits");
    side.append(make("h3", "", title), clock);
    sides.append(side);
    return { side, clock, answer: new Answer(side) };
  });
  const ended = await run(async (signal) => {
    for (const each of ran) { // one after the other, so that neither slows the other down
      each.figures = new Figures();
      body.method = each === ran[0] ? "none" : null;
      for await (const event of eventsOf(body, signal)) {
        each.answer.take(event);
        each.figures.take(event);
        const speed = (each.figures.told ?? each.figures.live).tokens_per_second;
        each.clock.textContent = `${each.figures.tokens} tokens, ${speed.toFixed(1)} per s`;
      }
    }
  }, node);
  for (const each of ran) each.answer.draw();
  node.append(make("p", "verdict", ended && ran[1].figures?.told ? judge(ran) : "Not finished."));
  log.scrollTop = log.scrollHeight;
}

function judge([plain, drafts]) {
  const [fast, slow] = [drafts, plain].map((each) => each.figures.told.tokens_per_second);
  const [one, other] = [drafts, plain].map(({ answer }) => answer.thought + answer.text);
  const words = one === other ? "the same answer, to the letter" : "the answers differ, as near-ties can";
  if (drafts.figures.told.method === "none") return `This server makes no drafts; ${words}.`;
  if (!fast || !slow) return `Too short to compare; ${words}.`;
  (fast >= slow ? drafts : plain).side.classList.add("faster");
  const start = fast < slow ? "Drafts were slower here: " : "";
  return `${start}${(fast / slow).toFixed(2)} times as fast with drafts; ${words}.`;
}

$("ask").onsubmit = (event) => (event.preventDefault(), send());
$("words").onkeydown = (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) $("ask").onsubmit(event);
};
document.onkeydown = (event) => {
  if (event.key === "Escape" && !$("lock").open) running?.abort();
};
$("stop").onclick = () => running?.abort();
$("race").onclick = race;
$("tinted").onchange = (event) => {
  const follow = atEnd();
  document.body.classList.toggle("tinted", event.target.checked);
  if (follow) log.scrollTop = log.scrollHeight;
};
$("server").ontoggle = () => showServer().catch((error) => tell(error.message, "error"));
setInterval(() => showServer().catch(() => {}), REFRESH);
$("new").onclick = () => {
  talk = [];
  log.replaceChildren($("welcome"));
  new Figures();
  tell("");
  $("words").focus();
};
showModels().catch((error) => tell(error.message, "error"));
$("words").focus();
