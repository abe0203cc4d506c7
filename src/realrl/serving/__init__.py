"""HTTP endpoint that speaks OpenAI's API, in front of an engine that samples tokens: see docs/serving.md.

Only `endpoint` and `listening` import starlette and uvicorn, which the extra `serve` installs.
"""
