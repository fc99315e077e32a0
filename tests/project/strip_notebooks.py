"""Strip notebooks for committing, as `test_notebooks.py` wants them: `make strip` runs this on all of them.

Like nbstripout, but an output that is kept (tag `keep_output`) keeps its execution count: without
one nbval does not compare.
"""

import sys


def strip(path: str) -> None:
    """Rewrite one notebook."""
    import nbformat  # takes a CPU second or two, and every process of the tests reads this file
    from nbstripout import strip_output

    notebook = strip_output(nbformat.read(path, 4), keep_output=False, keep_count=True, keep_id=True)
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for cell in notebook.cells:
        cell.metadata = {"tags": cell.metadata["tags"]} if cell.metadata.get("tags") else {}
        if cell.cell_type == "code" and not cell.outputs:
            cell.execution_count = None
    nbformat.write(notebook, path)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        strip(name)
