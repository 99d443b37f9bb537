"""The server: OpenAI's and Anthropic's HTTP APIs over one engine, with speed tiers and sessions that outlive a request.

    app -> openai_chat | openai_completions | openai_responses | anthropic -> asks -> scheduler -> sessions -> engine

`app.create_app` builds the service, `run.run_server` runs it.
"""
