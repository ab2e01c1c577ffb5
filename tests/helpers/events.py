"""Events in the files that a run writes for TensorBoard."""

import struct

from tensorboardX.proto.event_pb2 import Event


def events(folder):
    """Yields the steps, tags and values in the files of a folder, in their order."""
    for path in sorted(folder.iterdir(), key=lambda path: path.name[-4:]):
        content = path.read_bytes()
        while content:
            # A record is its length, a checksum, its data and another checksum.
            (length,) = struct.unpack("<Q", content[:8])
            event = Event.FromString(content[12 : 12 + length])
            content = content[16 + length :]
            for value in event.summary.value:
                yield event.step, value.tag, value.simple_value
