"""One order of moves, and no other."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.scheduling.colocation import Colocation, ColocationError, Move

LETTERS = dict(zip(Move, "ROTGWSPC", strict=True))
TURNS = re.compile(r"(ROT*GWSPC)*(R(O(T*|T*G(W(S(P)?)?)?))?)?")
"""Whole turns and the beginning of one more, said a second time: a regular language."""
TURN = [move for move in Move if move is not Move.TRAIN]


def take(machine: Colocation, move: Move, num_running: int = 0) -> None:
    with machine.move(move, num_running):
        pass


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from(list(Move)), st.integers(0, 2)),
            st.tuples(st.just(None), st.just(0)),  # the right one
        ),
        max_size=40,
    )
)
def test_every_other_order_and_every_release_of_what_runs_is_refused(wishes):
    machine, taken = Colocation(), ""
    for wish, num_running in wishes:
        right = [move for move in Move if TURNS.fullmatch(taken + LETTERS[move])]
        move = right[0] if wish is None else wish
        if move in right and (move is not Move.RELEASE_ENGINES or not num_running):
            take(machine, move, num_running)
            taken += LETTERS[move]
        else:
            with pytest.raises(ColocationError):
                take(machine, move, num_running)
        assert machine.are_trainers_up == (re.search(r"OT*$", taken) is not None)
        assert machine.awaits_sync == taken.endswith("W")


def test_a_move_that_failed_may_be_tried_again_and_nothing_else():
    machine = Colocation()
    take(machine, Move.RELEASE_ENGINES)
    with pytest.raises(OSError, match="lost"), machine.move(Move.ONLOAD_TRAINERS):
        raise OSError("lost")
    for other in set(Move) - {Move.ONLOAD_TRAINERS}:
        with pytest.raises(ColocationError, match="expected 'onload_trainers'"):
            take(machine, other)
    take(machine, Move.ONLOAD_TRAINERS)
    assert machine.are_trainers_up


def test_two_moves_at_once_are_refused():
    machine = Colocation()
    with machine.move(Move.RELEASE_ENGINES), pytest.raises(ColocationError, match="while another move runs"):
        take(machine, Move.ONLOAD_TRAINERS)
    take(machine, Move.ONLOAD_TRAINERS)


def test_a_release_with_requests_running_says_what_to_do():
    with pytest.raises(ColocationError, match="with 3 requests running; pause the engines first"):
        take(Colocation(), Move.RELEASE_ENGINES, 3)


def test_a_turn_without_training_is_whole():
    machine = Colocation()
    for move in (*TURN, *TURN):
        take(machine, move)
