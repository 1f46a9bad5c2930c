import os

import pytest
import torch


# Nothing in the suite may ask the network.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# One thread here and in the processes that tests start: `-n 2` fills two cores, and more threads wait for each other.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
