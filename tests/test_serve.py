"""The service over HTTP: many clients and tasks, tasks that come and go, and what is refused."""

import io
import json
import shutil
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tiny
import torch
import uvicorn
from PIL import Image
from transformers import AutoModelForImageClassification, ViTImageProcessor

from examples import serve


def save_task(folder, name, labels, seed):
    base = AutoModelForImageClassification.from_pretrained(
        folder / "vit", id2label=dict(enumerate(labels)), ignore_mismatched_sizes=True
    )
    model = tiny.prompted(base, num_prompts=[1, seed % 3, 0, 2])
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in (p for n, p in model.named_parameters() if "provpt_" in n or "_to_save" in n):
            parameter.normal_(std=0.2)
    model.save_pretrained(folder / "adapters" / name)


@pytest.fixture
def folder(tmp_path):
    """A backbone, and two tasks whose labels tell them."""
    tiny.make("vit").save_pretrained(tmp_path / "vit")
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path / "vit")
    for number in range(2):
        save_task(tmp_path, f"task{number}", [f"{number}-{label}" for label in range(2 + number)], seed=number)
    return tmp_path


class Service:
    """A running service, and requests to it."""

    def __init__(self, folder, **limits):
        self.app = serve.make_app(str(folder / "vit"), folder / "adapters", serve.Limits(**limits))
        self.server = uvicorn.Server(uvicorn.Config(self.app, port=0, log_level="error"))
        self.thread = threading.Thread(target=self.server.run)

    def __enter__(self):
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]
        return self

    def __exit__(self, *error):
        self.server.should_exit = True
        self.thread.join()

    def ask(self, path, body=None, method=None):
        """Status code and answer."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data=body, method=method)
        try:
            with urllib.request.urlopen(request) as answer:
                content = answer.read()
                return answer.status, json.loads(content) if "json" in answer.headers["Content-Type"] else content
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())


def picture(seed=0, size=(20, 20), kind="PNG"):
    pixels = np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def test_tasks_and_the_page(folder):
    with Service(folder) as service:
        assert service.ask("/tasks") == (200, {"tasks": ["task0", "task1"], "in_memory": [], "bytes": 0})
        status, answer = service.ask("/tasks/task1", picture())
        assert (status, answer["task"], answer["label"]) == (200, "task1", next(iter(answer["scores"])))
        assert sorted(answer["scores"]) == ["1-0", "1-1", "1-2"]
        assert sum(answer["scores"].values()) == pytest.approx(1)
        assert service.ask("/tasks")[1]["in_memory"] == ["task1"]
        assert service.ask("/tasks/task1", method="DELETE") == (200, {"unloaded": "task1"})
        assert service.ask("/tasks/task1", method="DELETE")[0] == 404
        status, page = service.ask("/")
        assert status == 200
        assert b"<select" in page


def test_what_is_refused_leaves_the_others_alone(folder):
    shutil.copytree(folder / "adapters" / "task0", folder / "adapters" / "broken")
    (folder / "adapters" / "broken" / "adapter_model.safetensors").write_bytes(b"broken")
    huge = io.BytesIO()
    Image.new("1", (20_000, 20_000)).save(huge, "PNG")
    deep = io.BytesIO()
    Image.fromarray(np.full((20, 20), 30_000, dtype=np.uint16)).save(deep, "PNG")
    cut = picture(size=(200, 200))[:1000]
    requests = {
        "unknown": ("/tasks/unknown", picture(), 404, "no task"),
        "path": ("/tasks/..%2Fadapters%2Ftask0", picture(), 404, ""),
        "broken": ("/tasks/broken", picture(), 500, "complete safetensors"),
        "dots": ("/tasks/%2E%2E", picture(), 404, ""),
        "long name": ("/tasks/" + "a" * 300, picture(), 404, ""),
        "16 bits": ("/tasks/task0", deep.getvalue(), 415, "8 bits per channel"),
        "no image": ("/tasks/task0", b"no image", 415, "must be an image"),
        "cut": ("/tasks/task0", cut, 415, "must be an image"),
        "empty": ("/tasks/task0", b"", 415, "must be an image"),
        "huge": ("/tasks/task0", huge.getvalue(), 413, "50,000,000 pixels"),
        "long": ("/tasks/task0", b"0" * 20_000_001, 413, "20,000,000 bytes"),
    }
    with Service(folder) as service, ThreadPoolExecutor(16) as clients:
        wanted = service.ask("/tasks/task0", picture())
        good = [clients.submit(service.ask, "/tasks/task0", picture()) for _ in range(20)]
        bad = {name: clients.submit(service.ask, path, body) for name, (path, body, *_) in requests.items()}
        for name, (_, _, status, text) in requests.items():
            code, answer = bad[name].result()
            assert (code, text in answer["detail"]) == (status, True), (name, code, answer)
        for answer in good:
            status, found = answer.result()
            assert status == 200
            assert found["scores"] == pytest.approx(wanted[1]["scores"], abs=1e-5)


def test_too_many_requests_are_told_to_come_again(folder):
    with Service(folder, waiting=1, batch_size=1) as service, ThreadPoolExecutor(16) as clients:
        service.ask("/tasks/task0", picture())
        answers = [clients.submit(service.ask, "/tasks/task0", picture()) for _ in range(100)]
        codes = {answer.result()[0] for answer in answers}
        assert codes == {200, 503}
        assert service.ask("/tasks/task0", picture())[0] == 200


def test_a_turned_picture_is_turned_back(folder):
    image = Image.open(io.BytesIO(picture(size=(30, 20))))
    exif = Image.Exif()
    exif[274] = 6  # to be turned by 90 degrees to the right
    file = io.BytesIO()
    image.transpose(Image.Transpose.ROTATE_90).save(file, "PNG", exif=exif)
    with Service(folder) as service:
        turned, plain = (service.ask("/tasks/task1", body)[1] for body in (file.getvalue(), picture(size=(30, 20))))
        assert turned["scores"] == pytest.approx(plain["scores"], abs=1e-5)


@pytest.mark.parametrize(
    ("requests", "tasks"), [(200, 6), pytest.param(2000, 50, marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_each_request_gets_its_own_task_s_labels_while_tasks_come_and_go(folder, requests, tasks):
    for number in range(tasks):
        save_task(folder, f"task{number}", [f"{number}-{label}" for label in range(2 + number % 4)], seed=number)
    done = threading.Event()

    def comes_and_goes(service):
        number = 0
        while not done.is_set():
            shutil.copytree(folder / "adapters" / "task0", folder / "new")
            (folder / "new").rename(folder / "adapters" / "extra")
            assert service.ask("/tasks/extra", picture())[0] == 200
            service.ask(f"/tasks/task{number % tasks}", method="DELETE")
            service.ask("/tasks/extra", method="DELETE")
            shutil.rmtree(folder / "adapters" / "extra")
            assert service.ask("/tasks/extra", picture())[0] == 404
            number += 1
        return number

    with Service(folder) as service, ThreadPoolExecutor(17) as clients:
        changes = clients.submit(comes_and_goes, service)
        chosen = np.random.default_rng(0).integers(tasks, size=requests).tolist()
        bodies = [picture(seed) for seed in range(7)]
        paths = [f"/tasks/task{number}" for number in chosen]
        answers = list(clients.map(service.ask, paths, (bodies[n % 7] for n in range(requests))))
        done.set()
        assert changes.result() > 0
        alone = {}
        for place, (number, (status, answer)) in enumerate(zip(chosen, answers, strict=True)):
            assert (status, answer["task"]) == (200, f"task{number}")
            assert sorted(answer["scores"]) == [f"{number}-{label}" for label in range(2 + number % 4)]
            if (number, place % 7) not in alone:
                alone[number, place % 7] = service.ask(f"/tasks/task{number}", bodies[place % 7])[1]["scores"]
            assert answer["scores"] == pytest.approx(alone[number, place % 7], abs=1e-5)
