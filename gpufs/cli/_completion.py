"""Changes click's completions for shells. Loaded when a shell asks for completions."""

from click.shell_completion import FishComplete, add_completion_class


@add_completion_class
class _Fish(FishComplete):
    """Complete as click does, but click's script cuts values and descriptions at their first comma."""

    source_template = FishComplete.source_template.replace('string split ","', 'string split --max 1 ","')
