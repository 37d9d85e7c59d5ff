// Vercel's AI SDK with its provider for servers like ours: a text, whole and streamed.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText } from "ai";

const [baseURL, name] = process.argv.slice(2);
const provider = createOpenAICompatible({ name: "outrider", baseURL, apiKey: "none", includeUsage: true });
const how = { model: provider(name), prompt: "hi", seed: 7, maxOutputTokens: 24 };

const whole = await generateText(how);
const stream = streamText(how);
const streamed = [];
for await (const part of stream.textStream) streamed.push(part);
console.log(
  JSON.stringify({
    whole: whole.text,
    finish: whole.finishReason,
    tokens: whole.usage.outputTokens,
    streamed: streamed.join(""),
    streamedTokens: (await stream.usage).outputTokens,
  }),
);
