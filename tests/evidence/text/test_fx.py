"""Graph text as torch prints it -> nodes; texts below are shortened from real traces of torch 2.11 and 2.13."""

from __future__ import annotations

from textwrap import dedent

from tpcompile.evidence.records import Graph, Node
from tpcompile.evidence.text.fx import parse_graph
from tpcompile.evidence.text.normalise import GroupRoles

HEADER = (
    'class GraphModule(torch.nn.Module):\n    def forward(self, L_x_: "f32[4, 8][8, 1]cpu", L_y_: "f32[8][1]cpu"):\n'
)


def parse(text: str, roles: dict[str, str] | None = None) -> Graph:
    """Parse a whole graph text."""
    return parse_graph(dedent(text), kind="dynamo", roles=GroupRoles(roles or {}))


def body(statements: str, roles: dict[str, str] | None = None) -> list[Node]:
    """Nodes that these statements add to a graph of two inputs."""
    indented = "".join(f"        {line}\n" for line in dedent(statements).strip().splitlines())
    return list(parse(HEADER + indented, roles).nodes[2:])


def says(node: Node) -> str:
    """A node as `target(args, key=value) -> value`."""
    args = ", ".join([*node.args, *(f"{k}={v}" for k, v in node.kwargs)])
    return f"{node.target}({args}) -> {node.value}"


def test_arguments_are_references_by_position_whatever_the_temporaries_are_called() -> None:
    one = body("a = torch.relu(L_x_)\nb = torch.add(a, L_y_, alpha = 2);  a = None\nreturn (b,)")
    two = body("zz_7 = torch.relu(L_x_)\nw = torch.add(zz_7, L_y_, alpha = 2);  zz_7 = None\nreturn (w,)")
    assert [says(n) for n in one] == [says(n) for n in two]
    assert says(one[1]) == "torch.add(%2, %1, alpha=2) -> "


def test_an_alias_of_an_input_is_the_input() -> None:
    assert body("l_x_ = L_x_\ny = l_x_.relu()")[0].args == ("%0",)


def test_freeing_a_temporary_is_not_a_node() -> None:
    assert len(body("a = torch.relu(L_x_);  a = None")) == 1


def test_keyword_arguments_are_in_the_node_in_any_order() -> None:
    one, two = body("a = f(L_x_, dim = 1, alpha = 'x')"), body("a = f(L_x_, alpha = 'x', dim = 1)")
    assert one[0].kwargs == two[0].kwargs == (("alpha", "'x'"), ("dim", "1"))


def test_operators_have_the_names_of_the_operator_module() -> None:
    statements = "a = L_x_ * 2\nb = -a\nc = b < 0\nd = b @ L_y_\ne = d[0]\nf = a ** 2"
    assert [n.target for n in body(statements)] == ["mul", "neg", "lt", "matmul", "getitem", "pow"]


def test_an_in_place_operator_is_a_node_that_later_uses_refer_to() -> None:
    nodes = body('L_x_ += L_y_;  a_1: "f32[4, 8][8, 1]cpu" = L_x_;  L_x_ = None\nb = torch.relu(a_1)')
    assert says(nodes[0]) == "iadd(%0, %1) -> f32[4, 8][8, 1]cpu"
    assert nodes[1].args == ("%2",)


def test_assigning_a_tensor_into_a_slice_is_a_node_with_its_index_and_value() -> None:
    nodes = body("a = L_x_.clone()\na[(slice(None, None, None), 1)] = L_y_;  setitem = a;  setitem = None")
    assert says(nodes[1]) == "setitem(%2[slice(None, None, None), 1], %1) -> "


def test_a_graph_without_the_slice_assignment_differs() -> None:
    with_it = body("a = L_x_.clone()\na[0] = L_y_;  setitem = a;  setitem = None\nreturn (a,)")
    without = body("a = L_x_.clone()\nreturn (a,)")
    assert [says(n) for n in with_it] != [says(n) for n in without]


def test_a_number_assigned_into_a_slice_is_compared() -> None:
    assert says(body("L_x_[0] = 0.5")[0]) != says(body("L_x_[0] = 0.25")[0])


def test_a_method_call_and_an_attribute_refer_to_their_tensor() -> None:
    nodes = body("a = L_x_.view(2, 16)\nb = a.T")
    assert [says(n) for n in nodes] == ["method view(%0, 2, 16) -> ", "%2.T() -> "]


def test_large_and_negative_numbers_of_the_user_are_kept() -> None:
    assert body("a = f(L_x_, 140238573782336, -1, 1e-06)")[0].args[1:] == ("140238573782336", "-1", "1e-06")


def test_shape_symbols_are_renamed_by_first_appearance() -> None:
    one = body('a: "f32[s77, 8][8, 1]cpu" = f(L_x_, s77)\nb: "f32[s27, s77]cpu" = f(a)')
    two = body('a: "f32[s0, 8][8, 1]cpu" = f(L_x_, s0)\nb: "f32[s1, s0]cpu" = f(a)')
    assert [says(n) for n in one] == [says(n) for n in two]
    assert one[1].value != body('a: "f32[s0, 8]cpu" = f(L_x_)\nb: "f32[s0, s1]cpu" = f(a)')[1].value


def test_a_size_is_the_same_in_quotes_and_without_as_a_cache_prints_it() -> None:
    for quoted, bare in (
        ("Sym(2*s0)", "Sym(2 * s0)"),
        ("Sym(s0//2 + 1)", "Sym(s0 // 2 + 1)"),
        ("Sym(s0**2)", "Sym(s0**2)"),
    ):
        assert body(f'a: "{quoted}" = 2 * L_x_')[0].value == body(f"a: {bare} = 2 * L_x_")[0].value
    assert body('a: "Sym(2*s0)" = 2 * L_x_')[0].value != body("a: Sym(3 * s0) = 2 * L_x_")[0].value


def test_symbolic_floats_are_renamed_too() -> None:
    assert body('a: "Sym(zf16)" = L_x_.item()')[0].value == body('a: "Sym(zf3)" = L_x_.item()')[0].value


def test_unsigned_dtypes_are_not_mistaken_for_shape_symbols() -> None:
    values = [body(f'a: "{dtype}[3][1]cpu" = torch.zeros(3)')[0].value for dtype in ("u8", "u16", "u32")]
    assert values == ["u8[3][1]cpu", "u16[3][1]cpu", "u32[3][1]cpu"]


def test_the_device_index_does_not_count_and_the_device_type_does() -> None:
    def value(device: str, index: int) -> Node:
        return body(f"a: \"f32[4]{device}:{index}\" = torch.zeros(4, device = device(type='{device}', index={index}))")[
            0
        ]

    assert (
        says(value("cuda", 0)) == says(value("cuda", 7)) == "torch.zeros(4, device=device(type='cuda')) -> f32[4]cuda"
    )
    assert says(value("xpu", 0)) != says(value("cuda", 0))


def test_a_known_group_is_named_by_its_role() -> None:
    text = "a = torch.ops._c10d_functional.all_reduce.default(L_x_, 'sum', '{name}')"
    one = body(text.format(name="0"), {"0": "tp"})
    two = body(text.format(name="12"), {"12": "tp", "0": "dp"})
    assert one[0].args == two[0].args == ("%0", "'sum'", "group:tp")


def test_unknown_groups_are_numbered_by_first_appearance() -> None:
    def roles(*names: str) -> list[str]:
        calls = [f"a{i} = torch.ops._c10d_functional.all_reduce(L_x_, 'sum', '{n}')" for i, n in enumerate(names)]
        return [n.args[-1] for n in body("\n".join(calls))]

    assert roles("17", "3", "17") == roles("5", "4", "5") == ["group:group#0", "group:group#1", "group:group#0"]


def test_a_group_given_by_keyword_leaves_the_reduce_op_alone() -> None:
    node = body("a = torch.ops._c10d_functional.all_reduce(L_x_, 'sum', group_name = '0')", {"0": "tp"})[0]
    assert says(node) == "torch.ops._c10d_functional.all_reduce(%0, 'sum', group_name=group:tp) -> "


def test_a_string_argument_of_a_different_op_is_not_a_group() -> None:
    assert body("a = torch._C._nn.gelu(L_x_, 'tanh')")[0].args == ("%0", "'tanh'")


def test_the_users_line_holds_until_the_next_comment() -> None:
    nodes = body(
        """
        # File: /app/model.py:7 in forward, code: y = x * 2
        a = L_x_ * 2
        b = a + 1
        # No stacktrace found for following nodes
        c = b + 1
        # recompute: MUST_SAVE File: /app/model.py:9 in helper, code: return all_reduce(x)
        d = c + 1
        """
    )
    assert [str(n.line) for n in nodes] == [
        "/app/model.py:7 in forward", "/app/model.py:7 in forward", "None", "/app/model.py:9 in helper",
    ]  # fmt: skip
    assert nodes[0].line and nodes[0].line.code == "y = x * 2"


def test_bodies_of_an_autograd_function_are_subgraphs_with_their_own_numbering() -> None:
    graph = parse(
        """
        class GraphModule(torch.nn.Module):
            def forward(self, L_x_: "f32[4, 8][8, 1]cpu"):
                fwd_body_0 = self.fwd_body_0
                bwd_body_0 = self.bwd_body_0
                apply = torch.ops.higher_order.autograd_function_apply(fwd_body_0, bwd_body_0, L_x_);  fwd_body_0 = None
                getitem: "f32[4, 8][8, 1]cpu" = apply[0];  apply = None
                return (getitem,)

            class fwd_body_0(torch.nn.Module):
                def forward(self, y_1: "f32[4, 8][8, 1]cpu"):
                    # File: /app/model.py:22 in forward, code: return all_reduce(x)
                    all_reduce = torch.ops._c10d_functional.all_reduce(y_1, 'sum', '0')
                    return ((all_reduce,), ())

            class bwd_body_0(torch.nn.Module):
                def forward(self, gr: "f32[4, 8][8, 1]cpu"):
                    return (gr,)
        """,
        {"0": "tp"},
    )
    by_scope = {scope: [n.target for n in graph.nodes if n.scope == scope] for scope in ("", "0/", "1/")}
    assert by_scope["0/"] == ["input 0", "torch.ops._c10d_functional.all_reduce", "output"]
    assert by_scope["1/"] == ["input 0", "output"]
    reduce = next(n for n in graph.nodes if n.scope == "0/" and n.op == "call")
    assert (reduce.args, str(reduce.line)) == (("%0", "'sum'", "group:tp"), "/app/model.py:22 in forward")


def test_a_change_in_the_backward_body_changes_the_graph() -> None:
    text = (
        "class GraphModule(torch.nn.Module):\n    def forward(self, L_x_):\n        return (L_x_,)\n\n"
        "    class bwd_body_0(torch.nn.Module):\n        def forward(self, gr):\n            return ({},)\n"
    )
    assert parse(text.format("gr")) != parse(text.format("gr * 2"))


def test_names_of_graph_classes_do_not_count() -> None:
    text = "class {}(torch.nn.Module):\n    def forward(self, arg0_1):\n        return (arg0_1,)\n"
    assert parse(text.format("<lambda>")) == parse(text.format("GraphModule"))


def test_names_of_lowered_inputs_are_temporaries_and_of_dynamo_inputs_are_sources() -> None:
    text = "class GraphModule(torch.nn.Module):\n    def forward(self, {}):\n        return ({},)\n"
    assert parse(text.format("primals_3", "primals_3")).nodes[0].target == "input 0"
    assert parse(text.format("L_self_w", "L_self_w")).nodes[0].target == "L_self_w"


def test_a_signature_over_several_lines_with_comments_is_read() -> None:
    graph = parse(
        """
        class GraphModule(torch.nn.Module):
            def forward(
                self,
                primals_1: "f32[8][1]cpu",  # PlainAOTInput(idx=0)
                primals_2,  # SubclassGetAttrAOTInput(base=PlainAOTInput(idx=2), attr='device_mesh')
            ):
                mul: "f32[8][1]cpu" = torch.ops.aten.mul.Tensor(primals_1, 2.0)
                return (
                    mul,  # PlainAOTOutput(idx=0)
                    None,  # None
                )
        """
    )
    assert [n.op for n in graph.nodes] == ["placeholder", "placeholder", "call", "output"]
    assert graph.nodes[-1].args == ("(%2, None)",)


def test_text_that_is_not_python_is_still_compared_without_its_ids() -> None:
    def unparsed(constant: str, address: str) -> list[Node]:
        return list(parse(f"{HEADER}        a = f(L_x_, <object Foo at {address}>, {constant})\n").nodes)

    one = unparsed("1", "0x7f0011223344")
    assert [n.target for n in one] == ["L_x_", "L_y_", "unparsed"]
    assert one == unparsed("1", "0x7fffeeddccbb") != unparsed("2", "0x7f0011223344")


def test_one_statement_that_is_not_python_leaves_the_others_readable() -> None:
    def nodes(operand: str) -> list[Node]:
        body = f'        a: "f32[4]" = wrap(<function g at 0x7f0011223344>, {operand}, k = 2);  L_x_ = None\n'
        tail = "        b = torch.ops._c10d_functional.all_reduce(a, 'sum', '0');  a = None\n        return (b,)\n"
        return list(parse(f"{HEADER}        y = L_x_ + 1\n{body}{tail}").nodes)

    found = nodes("y")
    assert [n.target for n in found[2:]] == ["add", "unparsed", "torch.ops._c10d_functional.all_reduce", "output"]
    assert found[4].args[0] == "%3" and "%2" in found[3].args and found[3].value == "f32[4]"
    assert nodes("y") != nodes("L_x_")


def test_text_that_cannot_be_read_at_all_is_compared_line_by_line() -> None:
    def lines(constant: str) -> list[Node]:
        return list(parse(f"{HEADER}        a = f(L_x_,\n  <object at 0x7f0011223344>,\n  {constant})\n").nodes)

    assert {n.target for n in lines("1")} == {"unparsed"}
    assert lines("1") != lines("2")


def test_text_that_is_not_python_keeps_the_users_line() -> None:
    comment = "        # File: /app/model.py:7 in forward, code: y = f(x)\n"
    nodes = parse(f"{HEADER}{comment}        a = f(<Foo at 0x7f0011223344>)\n").nodes
    assert str(nodes[-1].line) == "/app/model.py:7 in forward"


SLICED = """
    class GraphModule(torch.nn.Module):
        def forward(self, s77: "Sym(s77)", {offset}L_x_: "f32[s77, 6]"):
            y: "f32[s77, 6]" = torch.relu(L_x_)
            {used}
            return (y, {saved})
"""


def test_a_size_that_nothing_has_or_reads_is_no_input() -> None:
    plain = parse(SLICED.format(offset="", used="pass", saved=""))
    view = parse(SLICED.format(offset='s84: "Sym(s84)", ', used="pass", saved="s84"))
    assert [says(node) for node in view.nodes] == [says(node) for node in plain.nodes]


def test_a_size_that_an_op_reads_is_an_input() -> None:
    view = parse(SLICED.format(offset='s84: "Sym(s84)", ', used="z = torch.arange(s84)", saved="z"))
    assert [node.value for node in view.nodes if node.op == "placeholder"][:2] == ["Sym(s#0)", "Sym(s#1)"]


def test_gradients_of_no_input_are_left_out_of_a_backward_graph_only() -> None:
    text = dedent(SLICED.format(offset="", used="pass", saved="None"))
    outputs = {
        kind: parse_graph(text, kind=kind, roles=GroupRoles({})).nodes[-1].args for kind in ("backward", "dynamo")
    }
    assert outputs == {"backward": ("(%2,)",), "dynamo": ("(%2, None)",)}
