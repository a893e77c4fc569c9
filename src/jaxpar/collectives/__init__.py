"""Ring collectives on any mesh, one axis or several in any order."""

from jaxpar.collectives._ragged import ragged_all_to_all as ragged_all_to_all
from jaxpar.collectives._ring_collectives import ring_all_gather as ring_all_gather
from jaxpar.collectives._ring_collectives import ring_all_reduce as ring_all_reduce
from jaxpar.collectives._ring_collectives import ring_reduce_scatter as ring_reduce_scatter
from jaxpar.collectives._ring_collectives import ring_shift as ring_shift
