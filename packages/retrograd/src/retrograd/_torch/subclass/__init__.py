"""The door to tensor subclasses that wrap other tensors (the ``__tensor_flatten__`` protocol).

In: tensors of such classes. Out: their inner tensors and metadata, and the tensors again.
"""

from retrograd._torch.subclass.border import SubclassBorder
from retrograd._torch.subclass.layout import PLAIN, Layout, built, is_wrapper, layout_of, parts_of
