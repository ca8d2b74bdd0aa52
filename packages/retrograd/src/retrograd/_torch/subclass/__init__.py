"""The door to tensor subclasses that wrap other tensors (the ``__tensor_flatten__`` protocol).

In: tensors of such classes. Out: their inner tensors and metadata, and the tensors again.
"""

from retrograd._torch.subclass.border import SubclassBorder, is_wrapper
from retrograd._torch.subclass.wrappers import PLAIN, Wrapping, built, parts_of, wrapping_of
