// OpenAI's own client for Node: a chat, whole, streamed and through its streaming helper.
import OpenAI from "openai";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: url, apiKey: "none", maxRetries: 0 });
const how = { model, messages: [{ role: "user", content: "hi" }], max_tokens: 24, seed: 7 };

const whole = await client.chat.completions.create(how);
const streamed = [];
for await (const chunk of await client.chat.completions.create({ ...how, stream: true })) {
  streamed.push(chunk.choices[0].delta.content ?? "");
}
const helper = client.chat.completions.stream({ ...how, stream_options: { include_usage: true } });
const final = await helper.finalChatCompletion();
const text = await client.completions.create({ model, prompt: "hi", max_tokens: 24, seed: 7 });
let refused = null;
try {
  await client.chat.completions.create({ ...how, temperature: -1 });
} catch (error) {
  refused = [error.constructor.name, error.param];
}
console.log(
  JSON.stringify({
    whole: whole.choices[0].message.content,
    finish: whole.choices[0].finish_reason,
    tokens: whole.usage.completion_tokens,
    streamed: streamed.join(""),
    helper: final.choices[0].message.content,
    text: text.choices[0].text,
    refused,
  }),
);
