"""The client's side of `flower_rounds.py`, which Ray's workers run."""

import functools

import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch_loop import train_client
from torch_task import build, read_clients

__all__ = ["app"]

app = ClientApp()


@functools.cache
def prepare(data_file, model, hidden, classes, threads, seed):
    """Data and model of this process."""
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    train, _ = read_clients(data_file, model)
    return train, build(model, train[0][0][0], hidden, classes)


@app.train()
def train(message: Message, context) -> Message:
    """Trains the weights that came on the data of the client that was asked for."""
    del context
    work, training = (dict(message.content[key]) for key in ("work", "training"))
    clients, model = prepare(**work)
    x, y = clients[message.content["client"]["id"]]
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    loss = train_client(model, x, y, **training).item()
    metrics = MetricRecord({"loss": loss, "num-examples": len(y)})
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}
    return Message(content=RecordDict(content), reply_to=message)
