"""The wire of OpenEnv's servers, for tests without the package: openenv_games_script.Numbers."""

import json

from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocketDisconnect

ACTION = {"properties": {"number": {"type": "string"}, "metadata": {}}, "required": ["number"]}


def make_app(*, forgetful=False, capacity=64):
    """An app that counts its open sessions in `app.state.open`."""
    count = 0

    def observation(text, reward=None, done=False):
        shown = {"text": text, "metadata": {}}
        data = {"observation": shown, "reward": reward, "done": done}
        return {"type": "observation", "data": data}

    def error(code, message):
        return {"type": "error", "data": {"code": code, "message": message}}

    def step(secret, action):
        number = action.get("number")
        if not isinstance(number, str):
            listed = [{"loc": ["number"], "msg": "Field required"}]
            return error("VALIDATION_ERROR", "Invalid message") | {
                "data": {"code": "VALIDATION_ERROR", "message": "Invalid message", "errors": listed}
            }
        if not number.isdigit():
            return error("EXECUTION_ERROR", f"{number} is no number")
        guess = int(number)
        if guess == secret:
            return observation("right", 1.0, done=True)
        return observation("higher" if guess < secret else "lower", 0.0)

    async def session(socket):
        nonlocal count
        await socket.accept()
        if app.state.open >= capacity:
            await socket.send_json(error("CAPACITY_REACHED", "full"))
            await socket.close()
            return
        app.state.open += 1
        secret = 0
        try:
            while True:
                asked = json.loads(await socket.receive_text())
                if asked["type"] == "reset":
                    count += 1
                    secret = (count if forgetful else asked["data"].get("seed", 0)) % 10
                    answer = observation(f"Guess from 0 to 9. Hint: {secret}")
                else:
                    answer = step(secret, asked["data"])
                await socket.send_json(answer)
        except WebSocketDisconnect:
            pass
        finally:
            app.state.open -= 1

    app = Starlette(
        routes=[
            Route("/schema", lambda request: JSONResponse({"action": ACTION})),
            Route(
                "/metadata", lambda request: JSONResponse({"description": "Numbers environment"})
            ),
            WebSocketRoute("/ws", session),
        ]
    )
    app.state.open = 0
    return app
