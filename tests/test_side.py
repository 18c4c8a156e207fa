"""Sides of a comparison, as a command line writes them."""

import pytest

from kvgen.side import Side, SideError, parse_side


@pytest.mark.parametrize(
    ("text", "side"),
    [
        ("a.yaml", Side("a.yaml", None, ())),
        ("-", Side("-", None, ())),
        ("a=b.yaml", Side("a=b.yaml", None, ())),
        ("a.yaml,config=c.json", Side("a.yaml", "c.json", ())),
        ("config=c.json", Side(None, "c.json", ())),
        ("config=c.json,role=both", Side(None, "c.json", ("role=both",))),
        ("a.yaml,role=both,config=d/c=1.json", Side("a.yaml", "d/c=1.json", ("role=both",))),
        ("a.yaml,x=0,4,8,role=both", Side("a.yaml", None, ("x=0,4,8", "role=both"))),
        ("a.yaml,x=,y=1=2", Side("a.yaml", None, ("x=", "y=1=2"))),
    ],
)
def test_side(text: str, side: Side) -> None:
    assert parse_side(text) == side


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a spec"),
        (",config=c.json", ",config=c.json: expected a spec in front of the first comma"),
        ("a.yaml,", "a.yaml,: expected K=V, found ``"),
        ("a.yaml,fp8", "a.yaml,fp8: expected K=V, found `fp8`"),
        ("a.yaml,config=c.json,fp8", "a.yaml,config=c.json,fp8: expected K=V, found `fp8`"),
        ("a.yaml,config=c.json,config=d.json", "a.yaml,config=c.json,config=d.json: `config` is given twice"),
        ("a.yaml,config=", "a.yaml,config=: expected a file behind `config=`"),
        ("config=", "config=: expected a file behind `config=`"),
    ],
)
def test_no_side(text: str, message: str) -> None:
    with pytest.raises(SideError) as caught:
        parse_side(text)
    assert str(caught.value) == message


def test_a_side_is_of_something() -> None:
    with pytest.raises(SideError, match="needs a spec or a config"):
        Side(None, None, ("role=both",))
