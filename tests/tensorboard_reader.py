"""Read TensorBoard's event files: records of length, crc, event, crc."""

import struct
from pathlib import Path

from tensorboardX.crc32c import crc32c
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData


def _masked(data):
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def read_events(folder):
    """Return the events of the only file in a folder."""
    (path,) = Path(folder).iterdir()
    data, place, events = path.read_bytes(), 0, []
    while place + 12 < len(data):  # a later record may not be written completely yet
        length, crc = struct.unpack_from("<QI", data, place)
        assert crc == _masked(data[place : place + 8])
        payload = data[place + 12 : place + 12 + length]
        assert struct.unpack_from("<I", data, place + 12 + length) == (_masked(payload),)
        events.append(Event.FromString(payload))
        place += 16 + length
    return events


def scalars(events):
    """Return [(step, {tag: value})] of the events that have scalars, in order."""
    rows = [(e.step, {v.tag: v.simple_value for v in e.summary.value}) for e in events]
    return [(step, row) for step, row in rows if row and not any(t.startswith("_") for t in row)]


def hyperparameters(events):
    """Return {name: value} of the HParams page."""
    found = {}
    for event in events:
        for value in event.summary.value:
            if value.tag == "_hparams_/session_start_info":
                content = HParamsPluginData.FromString(value.metadata.plugin_data.content)
                for name, given in content.session_start_info.hparams.items():
                    found[name] = getattr(given, given.WhichOneof("kind"))
    return found
