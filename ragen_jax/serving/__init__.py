"""An endpoint that serves the policy to any agent, and records its own tokens.

conversation.py  messages of the OpenAI API -> token ids, and sampled ids -> a message
tool_calls.py    tool calls in the text of a reply
recording.py     the calls of a session: which continues which, exactly
sessions.py      keys and budgets
record_file.py   where the conversations of ended sessions are kept
engine.py        replies to requests of all sessions, in rows of one cache
protocol.py      requests, responses and errors of chat completions
completions.py   the same for prompts as text or token ids
responses.py     the same for the Responses API
server.py        the HTTP server
loopback.py      the server in a thread of this process
play.py          episodes that programs play through it, while a run samples
episodes.py      the calls of such an episode as turns
harness_chat.py  what is reasoning in its replies
"""
