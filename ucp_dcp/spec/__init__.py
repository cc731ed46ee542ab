"""The sentences of the UCP language: name rules -> ordered steps, read from YAML or plain data (``docs/language.md``)."""

from .expr import Expr
from .lint import Finding, lint
from .megatron import mla_down_sharded
from .model import Rule, StateSpec, Step, Variable, check_variables
from .name_map import NameMap, ready_name_maps
from .name_plan import MappedTensor, NamePlan
from .names import NameGlob, Template
from .parse import LayoutSpec, ready_specs
from .universal import from_universal_info

__all__ = [
    "Expr",
    "Finding",
    "LayoutSpec",
    "MappedTensor",
    "NameGlob",
    "NameMap",
    "NamePlan",
    "Rule",
    "StateSpec",
    "Step",
    "Template",
    "Variable",
    "check_variables",
    "from_universal_info",
    "lint",
    "mla_down_sharded",
    "ready_name_maps",
    "ready_specs",
]
