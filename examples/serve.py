"""Serve many tasks with one backbone over HTTP: images in, labels out.

    python examples/serve.py --base_model google/vit-base-patch16-224-in21k --adapters outputs
    curl --data-binary @rose.jpg http://127.0.0.1:8000/tasks/flowers

Each folder in `--adapters` is a task with the folder's name. A task is loaded at its first request. You can add and
remove folders while the service runs. Requests that arrive together go through the backbone in one batch, whatever
their tasks.

| request | answer |
| --- | --- |
| `POST /tasks/NAME` with the image file as the body | the label, and the score of each label |
| `GET /tasks` | all tasks, and those in memory |
| `DELETE /tasks/NAME` | the task is removed from memory, and loaded again at its next request |
| `GET /` | a page to try it by hand |

Status codes: 404 there is no such task, 413 the image is too large, 415 the body is not an image, 500 the task's
adapter is broken, 503 too many requests are waiting. An error affects only its own request.
"""

from __future__ import annotations

import argparse
import asyncio
import io
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import HTMLResponse
from PIL import Image, ImageOps

from provpt_peft import ClassifierPool, Prediction
from provpt_peft.share.pool import UnknownTask


PAGE = """<!doctype html><meta charset="utf-8"><title>Tasks</title>
<h1>Tasks</h1><p>Choose a task and an image.</p>
<select id="task"></select> <input id="image" type="file" accept="image/*"><pre id="answer"></pre>
<script>
const find = id => document.getElementById(id);
fetch("tasks").then(answer => answer.json()).then(({tasks}) => {
  for (const name of tasks) find("task").add(new Option(name));
});
find("image").onchange = find("task").onchange = async () => {
  const file = find("image").files[0];
  if (!file) return;
  const answer = await fetch("tasks/" + encodeURIComponent(find("task").value), {method: "POST", body: file});
  find("answer").textContent = JSON.stringify(await answer.json(), null, 2);
};
</script>"""


@dataclass
class Limits:
    """Limits of the service.

    Args:
        batch_size: Maximum number of images in a batch.
        waiting: Maximum number of requests at a time: being read, waiting or being computed.
        pixels: Maximum number of pixels of an image.
        size: Maximum size of its file in bytes.
    """

    batch_size: int = 32
    waiting: int = 256
    pixels: int = 50_000_000
    size: int = 20_000_000


# A request: its task, its image, and the future for its prediction.
Waiting = tuple[str, Image.Image, "asyncio.Future[Prediction]"]


class Batches:
    """Runs waiting requests through the pool in batches, in a separate thread.

    Args:
        pool: The tasks.
        limits: Images in a batch, and requests that wait.
    """

    def __init__(self, pool: ClassifierPool, limits: Limits) -> None:
        self.pool = pool
        self.limits = limits
        self._waiting: asyncio.Queue[Waiting] = asyncio.Queue()
        self._thread = ThreadPoolExecutor(1)

    async def classify(self, task: str, image: Image.Image) -> Prediction:
        """The prediction for an image.

        Raises:
            UnknownTask, ValueError: What the pool raises for the task.
        """
        result: asyncio.Future[Prediction] = asyncio.get_running_loop().create_future()
        self._waiting.put_nowait((task, image, result))
        return await result

    async def run(self) -> None:
        """Serve forever. While a batch is computed, the next one is collected."""
        loop = asyncio.get_running_loop()
        while True:
            batch = [await self._waiting.get()]
            while len(batch) < self.limits.batch_size and not self._waiting.empty():
                batch.append(self._waiting.get_nowait())
            requests = [(task, image) for task, image, _ in batch]
            answers = await loop.run_in_executor(self._thread, self._answer, requests)
            for (_, _, result), answer in zip(batch, answers, strict=True):
                if result.cancelled():  # its client has disconnected
                    continue
                if isinstance(answer, Exception):
                    result.set_exception(answer)
                else:
                    result.set_result(answer)

    def _answer(self, requests: list[tuple[str, Image.Image]]) -> list[Prediction | Exception]:
        """A prediction for each request, or what is wrong with its task."""
        wrong: dict[str, Exception] = {}
        for task in {task for task, _ in requests}:
            try:
                self.pool.labels(task)
            except Exception as error:
                wrong[task] = error
        good = [(task, image) for task, image in requests if task not in wrong]
        try:
            found = iter(self.pool.classify([image for _, image in good], [task for task, _ in good]))
        except Exception as error:
            if len(requests) == 1:
                return [error]
            # One by one, so that an error affects only its own request.
            return [answer for request in requests for answer in self._answer([request])]
        return [wrong[task] if task in wrong else next(found) for task, _ in requests]


def read_image(content: bytes, limits: Limits) -> Image.Image:
    """An image from a file's bytes.

    Raises:
        HTTPException: 413 if it is too large, 415 if it is not an image.
    """
    try:
        image = Image.open(io.BytesIO(content))
        if image.width * image.height > limits.pixels:
            raise HTTPException(
                413, f"An image may have at most {limits.pixels:,} pixels, got {image.width} x {image.height}."
            )
        if image.mode.startswith(("I", "F")):  # Pillow would clip, not scale
            raise HTTPException(415, f"An image must have 8 bits per channel, got Pillow's mode {image.mode}.")
        return ImageOps.exif_transpose(image).convert("RGB")
    except Image.DecompressionBombError as error:
        raise HTTPException(413, f"An image may have at most {limits.pixels:,} pixels. {error}") from None
    except HTTPException:
        raise
    except Exception as error:  # Pillow raises many kinds of errors
        raise HTTPException(415, f"The body must be an image file: {error}") from None


def make_app(base_model: str, adapters: Path, limits: Limits, capacity: int = 1000, device: str = "cpu") -> FastAPI:
    """Make the service.

    Args:
        base_model: Folder or Hub id of the backbone.
        adapters: Folder of the adapters.
        limits: Limits of the service.
        capacity: Maximum number of tasks in memory.
        device: Where to compute.
    """

    def find(name: str) -> Path | None:
        plain = name == Path(name).name and name != ".." and len(name) < 200  # not a path
        return adapters / name if plain and (adapters / name / "adapter_config.json").is_file() else None

    pool = ClassifierPool(base_model, find, capacity=capacity, device=device)
    batches = Batches(pool, limits)
    places = asyncio.Semaphore(limits.waiting)
    decoding = ThreadPoolExecutor()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        worker = asyncio.create_task(batches.run())
        yield
        worker.cancel()

    app = FastAPI(title="Tasks", lifespan=lifespan)

    @app.get("/", response_class=HTMLResponse)
    async def page() -> str:
        return PAGE

    @app.get("/tasks")
    def tasks() -> dict[str, Any]:
        names = sorted(config.parent.name for config in adapters.glob("*/adapter_config.json"))
        return {"tasks": names, "in_memory": pool.tasks, "bytes": pool.nbytes}

    @app.delete("/tasks/{name}")
    def unload(name: str) -> dict[str, str]:
        try:
            pool.unload(name)
        except KeyError:
            raise HTTPException(404, f"The task {name!r} is not in memory.") from None
        return {"unloaded": name}

    @app.post("/tasks/{name}")
    async def classify(name: str, request: Request) -> dict[str, Any]:
        if find(name) is None:
            raise HTTPException(404, f"There is no task {name!r}.")
        if places.locked():  # before its body is read
            raise HTTPException(503, "Too many requests are waiting.", headers={"Retry-After": "1"})
        try:
            async with places:
                content = bytearray()
                async for part in request.stream():
                    content += part
                    if len(content) > limits.size:
                        raise HTTPException(413, f"A file may have at most {limits.size:,} bytes.")
                loop = asyncio.get_running_loop()
                image = await loop.run_in_executor(decoding, read_image, bytes(content), limits)
                prediction = await batches.classify(name, image)
        except UnknownTask:
            raise HTTPException(404, f"There is no task {name!r}.") from None
        except ValueError as error:
            raise HTTPException(500, str(error)) from None
        return {"task": name, "label": prediction.label, "scores": prediction.scores}

    return app


def main() -> None:
    limits = Limits()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base_model", required=True, help="folder or Hub id of the backbone")
    parser.add_argument("--adapters", type=Path, required=True, help="folder of the adapters, one sub-folder per task")
    parser.add_argument("--capacity", type=int, default=1000, help="maximum number of tasks in memory (default: 1000)")
    parser.add_argument("--device", default="cpu", help="where to compute (default: cpu)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on (default: 8000)")
    for name, text in {
        "batch_size": "maximum number of images in a batch", "waiting": "maximum number of requests at a time",
        "pixels": "maximum number of pixels of an image", "size": "maximum size of an image file in bytes",
    }.items():  # fmt: skip
        default = getattr(limits, name)
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} (default: {default})")
    args = parser.parse_args()
    if not args.adapters.is_dir():
        parser.error(f"--adapters must be a folder, got {args.adapters}")
    limits = Limits(args.batch_size, args.waiting, args.pixels, args.size)
    app = make_app(args.base_model, args.adapters, limits, args.capacity, args.device)
    uvicorn.run(app, host=args.host, port=args.port, log_level="info")


if __name__ == "__main__":
    main()
