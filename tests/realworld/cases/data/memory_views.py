# Memory views that a cell makes, and one of the notebook's that a cell writes through.
# outcome: equal
# compare: facts, buffer, numbers
# runs: always
# %%
import array

buffer = bytearray(b"abcdefgh")
numbers = array.array("d", [1, 2, 3, 4])
view = memoryview(buffer)
with memoryview(buffer) as released:
    length = len(released)
square = memoryview(numbers).cast("B").cast("d", (2, 2))

# %% accelerate
part = memoryview(b"abcdef")[1:4]
own = memoryview(bytearray(16)).cast("H", (2, 4))
own[1, 2] = 513
fixed = memoryview(array.array("i", [5, 6])).toreadonly()
view[0] = 65
holder = [view, own]
square[1, 1] = 9.0

# %%
view[1] = 66
square[0, 0] = 8.0
assert holder[0] is view
made = (part, own, fixed, view, square)
facts = [(type(one).__name__, one.format, one.shape, one.readonly, one.tolist()) for one in made]
