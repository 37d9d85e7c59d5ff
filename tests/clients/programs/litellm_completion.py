"""litellm: a chat, whole and streamed, and a text completion."""

import json
import sys

import litellm

url, model = sys.argv[1:]
how = {"model": f"openai/{model}", "api_base": url, "api_key": "none", "max_tokens": 24, "seed": 7}
messages = [{"role": "user", "content": "hi"}]
whole = litellm.completion(messages=messages, **how)
chunks = litellm.completion(
    messages=messages, stream=True, stream_options={"include_usage": True}, **how
)
streamed = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
text = litellm.text_completion(prompt="hi", **(how | {"model": f"text-completion-openai/{model}"}))
print(
    json.dumps(
        {
            "whole": whole.choices[0].message.content,
            "finish": whole.choices[0].finish_reason,
            "tokens": whole.usage.completion_tokens,
            "streamed": "".join(streamed),
            "text": text.choices[0].text,
        }
    )
)
