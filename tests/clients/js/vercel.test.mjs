// Vercel's AI SDK against a running agent that serves ember: its default model of OpenAI, which speaks the Responses API, and the one of
// chat. STOKER_BASE_URL names the agent. Every test is one thing an application does; none looks at anything that the SDK does not show.

import assert from "node:assert/strict";
import { test } from "node:test";

import { createOpenAI } from "@ai-sdk/openai";
import { embed, generateObject, generateText, isStepCount, streamText, tool } from "ai";
import { z } from "zod";

const openai = createOpenAI({ baseURL: `${process.env.STOKER_BASE_URL}/v1`, apiKey: "unused" });
const models = { default: openai("ember"), chat: openai.chat("ember") };
const settings = { temperature: 0, maxRetries: 0, maxOutputTokens: 300 };
const question = "Extract customer and quantity as JSON: Order from Vefe: 17 x vube, total 31 euros.";
const Order = z.object({ customer: z.string(), quantity: z.number().int() });

for (const [name, model] of Object.entries(models)) {
  test(`${name}: generateText and streamText say the same`, async () => {
    const { text } = await generateText({ model, prompt: "What is 12 + 30?", ...settings });
    assert.equal(text, "42");
    assert.equal(await streamText({ model, prompt: "What is 12 + 30?", ...settings }).text, "42");
  });

  test(`${name}: generateObject`, async () => {
    const { object } = await generateObject({ model, schema: Order, prompt: question, ...settings });
    assert.deepEqual(object, { customer: "Vefe", quantity: 17 });
  });

  test(`${name}: a tool is called and its result answered`, async () => {
    const asked = [];
    const get_weather = tool({
      description: "Weather of a city",
      inputSchema: z.object({ city: z.string() }),
      execute: async (input) => { asked.push(input); return { temperature: 7 }; },
    });
    const { text } = await generateText({
      model, tools: { get_weather }, prompt: "What is the weather in Oslo?", stopWhen: isStepCount(3), ...settings,
    });
    assert.deepEqual(asked, [{ city: "Oslo" }]);
    assert.match(text, /7/);
  });
}

test("embed", async () => {
  const { embedding } = await embed({ model: openai.embedding("ember"), value: "Hello!" });
  assert.ok(embedding.length > 1);
});
