"""An endpoint that serves the policy to any agent, and records its own tokens.

conversation.py  messages of the OpenAI API -> token ids, and sampled ids -> a message
recording.py     the calls of a session: which continues which, exactly
engine.py        replies to requests of all sessions, in rows of one cache
protocol.py      requests, responses and errors in OpenAI's shape
server.py        the HTTP server
"""
