"""Private names of the toolkit that the tools use. No other tool imports them directly.

Each is imported on demand: a tool loads what it uses.
"""

from typing import TYPE_CHECKING

from jaxpar.arguments.lazy_names import names_on_demand

if TYPE_CHECKING:
    from jaxpar.arguments.calls import naming as naming
    from jaxpar.arguments.calls import of_user as of_user
    from jaxpar.arguments.calls import public as public
    from jaxpar.arguments.calls import readable as readable
    from jaxpar.arguments.calls import type_error as type_error
    from jaxpar.arguments.calls import value_error as value_error
    from jaxpar.arguments.dtypes import gathered_by as gathered_by
    from jaxpar.arguments.files import write_text as write_text
    from jaxpar.arguments.files import written as written
    from jaxpar.arguments.local_paths import local_path as local_path
    from jaxpar.arguments.optional_packages import distribution as distribution
    from jaxpar.arguments.optional_packages import install_command as install_command
    from jaxpar.arguments.optional_packages import installed as installed
    from jaxpar.arguments.optional_packages import lacking as lacking
    from jaxpar.arguments.types import AnyMesh as AnyMesh
    from jaxpar.arguments.types import Integer as Integer
    from jaxpar.arguments.types import MeshAxes as MeshAxes
    from jaxpar.arguments.types import Mode as Mode
    from jaxpar.arguments.types import Number as Number
    from jaxpar.arguments.unit_text import bytes_of as bytes_of
    from jaxpar.arguments.unit_text import size_text as size_text
    from jaxpar.arguments.unit_text import us as us
    from jaxpar.axis.axis import IN_TURNS as IN_TURNS
    from jaxpar.axis.axis import MODES as MODES
    from jaxpar.axis.axis import AxisLike as AxisLike
    from jaxpar.axis.axis import axis_names as axis_names
    from jaxpar.axis.checks import check_whole as check_whole
    from jaxpar.axis.checks_of_layers import check_number as check_number
    from jaxpar.axis.padding import PaddedDim as PaddedDim
    from jaxpar.axis.vma import varying_axes as varying_axes
    from jaxpar.choose.jit import enclosing as enclosing
    from jaxpar.choose.jit import jitted_like as jitted_like
    from jaxpar.choose.jit import jitted_with as jitted_with
    from jaxpar.choose.record import Decision as Decision
    from jaxpar.choose.record import WayRow as WayRow
    from jaxpar.choose.record import noting as noting
    from jaxpar.choose.sites import AUTO as AUTO
    from jaxpar.choose.sites import NAMED as NAMED
    from jaxpar.choose.sites import Asked as Asked
    from jaxpar.choose.sites import site_of as site_of
    from jaxpar.choose.trying import Choices as Choices
    from jaxpar.choose.trying import Trial as Trial
    from jaxpar.choose.trying import trying as trying
    from jaxpar.choose.tuning import versions as versions
    from jaxpar.compiler.compat import manual_axes as manual_axes
    from jaxpar.compiler.compat import reading_profiles as reading_profiles
    from jaxpar.compiler.jaxprs import COLLECTIVES as COLLECTIVES
    from jaxpar.compiler.jaxprs import LAX_NAMES as LAX_NAMES
    from jaxpar.compiler.jaxprs import subjaxprs as subjaxprs
    from jaxpar.compiler.jaxprs import type_of as type_of
    from jaxpar.compiler.options import compiled_with as compiled_with
    from jaxpar.compiler.options import kind_of as kind_of
    from jaxpar.compiler.options import options_like as options_like
    from jaxpar.compiler.options import options_of as options_of
    from jaxpar.layout._apply_rules import Shaped as Shaped
    from jaxpar.layout._array_layout import axes_by_dim as axes_by_dim
    from jaxpar.layout._mesh import check_mesh as check_mesh
    from jaxpar.layout._mesh import size_of as size_of
    from jaxpar.layout._optimizer_state import array_like as array_like
    from jaxpar.layout._optimizer_state import parameter_of as parameter_of
    from jaxpar.layout._paths import arrays_of as arrays_of
    from jaxpar.layout._paths import filling as filling
    from jaxpar.layout._paths import is_array as is_array
    from jaxpar.layout._paths import without_numbers as without_numbers
    from jaxpar.layout._ready_maps import Dims as Dims
    from jaxpar.layout._ready_maps import extended as extended
    from jaxpar.layout._rule import Entry as Entry
    from jaxpar.layout._rule import axes_of as axes_of
    from jaxpar.mesh.meshes import stays_within_a_slice as stays_within_a_slice
    from jaxpar.mesh.meshes import why_not_closed as why_not_closed
    from jaxpar.mesh.slices import on_torus as on_torus
    from jaxpar.mesh.slices import slice_of as slice_of
    from jaxpar.mesh.torus import closed_dims as closed_dims
    from jaxpar.platforms.async_options import environment_options as environment_options
    from jaxpar.platforms.chips import ADDED as ADDED
    from jaxpar.platforms.chips import NO_FIGURES as NO_FIGURES
    from jaxpar.platforms.chips import PERMUTE_STARTS as PERMUTE_STARTS
    from jaxpar.platforms.chips import REACHED as REACHED
    from jaxpar.platforms.chips import Chip as Chip
    from jaxpar.platforms.chips import Gpu as Gpu
    from jaxpar.platforms.chips import Tpu as Tpu
    from jaxpar.platforms.chips import chip_of as chip_of
    from jaxpar.platforms.chips import compiler_of as compiler_of
    from jaxpar.platforms.chips import is_tpu as is_tpu
    from jaxpar.platforms.chips import platform_of as platform_of
    from jaxpar.platforms.chips import platforms as platforms
    from jaxpar.platforms.chips import with_measured_links as with_measured_links
    from jaxpar.platforms.compilers import DESCRIBED as DESCRIBED
    from jaxpar.platforms.compilers import WHOLE_MATMULS as WHOLE_MATMULS
    from jaxpar.processes.heartbeat import jax_ends as jax_ends
    from jaxpar.processes.heartbeat import patience as patience
    from jaxpar.processes.meeting import arrange as arrange
    from jaxpar.processes.meeting import board_address as board_address
    from jaxpar.processes.meeting import board_listener as board_listener
    from jaxpar.processes.meeting import connect as connect
    from jaxpar.processes.meeting import met as met
    from jaxpar.processes.meeting import processes_text as processes_text
    from jaxpar.processes.meeting import token as token
    from jaxpar.processes.messages import read_message as read_message
    from jaxpar.processes.messages import write_message as write_message
else:
    __getattr__, __dir__ = names_on_demand(__name__)
