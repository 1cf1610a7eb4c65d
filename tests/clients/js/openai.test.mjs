// The official OpenAI client for JavaScript against a running agent that serves ember. STOKER_BASE_URL names the agent. Every test is
// one thing an application does; none looks at anything that the client does not show.

import assert from "node:assert/strict";
import { test } from "node:test";

import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const client = new OpenAI({ baseURL: `${process.env.STOKER_BASE_URL}/v1`, apiKey: "unused", maxRetries: 0 });
const model = "ember";
const question = "Extract customer and quantity as JSON: Order from Vefe: 17 x vube, total 31 euros.";
const Order = z.object({ customer: z.string(), quantity: z.number().int() });
const order = { customer: "Vefe", quantity: 17 };
const user = (content) => [{ role: "user", content }];

test("an answer is parsed by a schema of zod", async () => {
  const answer = await client.chat.completions.parse({
    model, messages: user(question), response_format: zodResponseFormat(Order, "order"), temperature: 0, max_tokens: 300,
  });
  assert.deepEqual(answer.choices[0].message.parsed, order);
});

test("runTools calls a function and answers with its result", async () => {
  const asked = [];
  const get_weather = (args) => { asked.push(args); return '{"temperature": 7}'; };
  const tool = {
    type: "function",
    function: {
      name: "get_weather", description: "Weather of a city", function: get_weather, parse: JSON.parse,
      parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
    },
  };
  const run = (stream) => client.chat.completions
    .runTools({ model, messages: user("What is the weather in Oslo?"), tools: [tool], temperature: 0, stream }).finalContent();
  assert.match(await run(false), /7/);
  assert.match(await run(true), /7/);
  assert.deepEqual(asked, [{ city: "Oslo" }, { city: "Oslo" }]);
});

test("a stream adds up to the whole answer", async () => {
  const options = { model, messages: user("Hello!"), temperature: 0 };
  const whole = await client.chat.completions.create(options);
  const stream = client.chat.completions.stream(options);
  assert.equal(await stream.finalContent(), whole.choices[0].message.content);
});

test("responses are made, streamed, parsed, kept and forgotten", async () => {
  const whole = await client.responses.create({ model, input: "What is 12 + 30?", temperature: 0 });
  assert.equal(whole.output_text, "42");
  const streamed = await client.responses.stream({ model, input: "What is 12 + 30?", temperature: 0 }).finalResponse();
  assert.equal(streamed.output_text, "42");
  const parsed = await client.responses.parse({ model, input: question, temperature: 0, text: { format: zodTextFormat(Order, "order") } });
  assert.deepEqual(parsed.output_parsed, order);
  assert.equal((await client.responses.retrieve(whole.id)).output_text, "42");
  await client.responses.delete(whole.id);
  await assert.rejects(client.responses.retrieve(whole.id), OpenAI.NotFoundError);
});

test("embeddings", async () => {
  const { data } = await client.embeddings.create({ model, input: ["Hello!", "What is 12 + 30?"] });
  const length = (vector) => Math.sqrt(vector.reduce((sum, value) => sum + value * value, 0));
  assert.equal(data.length, 2);
  assert.ok(Math.abs(length(data[0].embedding) - 1) < 1e-4);
});

test("a mistake names its parameter", async () => {
  await assert.rejects(client.chat.completions.create({ model, messages: user("Hello!"), temperature: 3 }), { param: "temperature" });
});
