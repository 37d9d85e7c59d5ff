"""langchain-openai: a chat model, whole and streamed."""

import json
import sys

from langchain_openai import ChatOpenAI

url, model = sys.argv[1:]
chat = ChatOpenAI(model=model, base_url=url, api_key="none", seed=7, max_completion_tokens=24)
whole = chat.invoke("hi")
streamed = "".join(chunk.content for chunk in chat.stream("hi"))
print(
    json.dumps(
        {
            "whole": whole.content,
            "finish": whole.response_metadata["finish_reason"],
            "tokens": whole.usage_metadata["output_tokens"],
            "streamed": streamed,
        }
    )
)
