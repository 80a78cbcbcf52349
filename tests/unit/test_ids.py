from array import array

import pytest

from kvroute import ids


@pytest.mark.parametrize("order", ["little", "big"])
def test_ids_are_little_endian_on_every_machine(order, monkeypatch):
    # A machine of the other order holds the same numbers in the other order of bytes.
    swapped = array("I", [1, 2**32 - 1, 0x01020304])
    if order == "big":
        swapped.byteswap()
    monkeypatch.setattr("sys.byteorder", order)
    packed = b"\x01\0\0\0\xff\xff\xff\xff\x04\x03\x02\x01"
    assert ids.packed(swapped) == packed
    assert ids.unpacked(packed) == swapped
