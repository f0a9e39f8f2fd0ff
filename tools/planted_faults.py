# SPDX-License-Identifier: BSD-3-Clause
"""Slips in functions that ``kill_matrix.py`` does not draw: a wrong or missing term or argument.

Each replaces a text that stands exactly once in its file.
"""

FAULTS: dict[str, tuple[tuple[str, str], ...]] = {
    "src/preamp/casting/regions.py": (
        ("if bracket.inside == around and CASTS.disabled is None:", "if CASTS.disabled is None:"),
    ),
    "src/preamp/casting/wrappers.py": (
        (
            "source is dtype or source not in CASTABLE or tensor.device.type != device_type",
            "source is dtype or tensor.device.type != device_type",
        ),
        ("return has_half and has_float32", "return has_half"),
    ),
    "src/preamp/core/pytree.py": (("kind(items, value.maxlen)", "kind(items)"),),
    "src/preamp/engine/block.py": (
        (
            "self._reaction = self._reaction or self.scaler.reaction()",
            "self._reaction = self.scaler.reaction()",
        ),
        ("is_due=adjust or before.is_due", "is_due=adjust"),
    ),
    "src/preamp/engine/clipping.py": (
        ("norm + _EPS", "norm"),
        ("(max_norm / (norm + _EPS)).clamp(max=1.0)", "max_norm / (norm + _EPS)"),
    ),
    "src/preamp/engine/optimizer_hooks.py": (
        ("self._stepping, self._unread = False, None  # whatever", "pass  # whatever"),
    ),
    "src/preamp/engine/session.py": (
        ("self.skips_in_row + 1 if skipped else 0", "self.skips_in_row + int(skipped)"),
        (
            "self.found_inf = found_inf = larger(found_inf, self.found_inf)",
            "self.found_inf = found_inf",
        ),
        ("is_sound = bool(torch.isfinite(norm))", "is_sound = True"),
    ),
    "src/preamp/engine/storage.py": (
        ("id(param) in updated and not kept.is_wide(param)", "not kept.is_wide(param)"),
        ("not kept.is_wide(param) and id(param) not in norms", "id(param) not in norms"),
        ("if is_in_codes(own, key):", "if False:"),
    ),
    "src/preamp/kernels/plans.py": (
        (" or tensor.is_neg():", ":"),
        ("if _without_grads(plan, squares) != fixed:", "if False:"),
        ("if np.count_nonzero(found) < len(self.places) * sum(map(bool, self.rows)):", "if False:"),
    ),
    "src/preamp/kernels/works.py": (
        ("if row and name not in left:", "if row and name not in (*left, 'P'):"),
    ),
    "src/preamp/kernels/plain/formulas.py": (
        ("size = size * c2**0.5 / c1", "size = size * c2 / c1"),
        ("ratio = p_norm / u_norm\n", "ratio = p_norm / (u_norm + 1e-3)\n"),
        ("g_norm + rule.weight_decay * p_norm + rule.eps", "g_norm + rule.weight_decay * p_norm"),
        ("number / c2**0.5 + rule.eps", "number / c2 + rule.eps"),
        ("(p_norm > 0) & (u_norm > 0)", "p_norm > 0"),
        ("-torch.expm1(slot.scalar(step) * log)", "1 - torch.exp(slot.scalar(step) * log)"),
    ),
    "src/preamp/kernels/plain/fused.py": (
        ("step = _constant(_number(update.step) if corrects else math.inf)", "step = _constant(1)"),
    ),
    "src/preamp/kernels/plain/lists.py": (
        ("total + count > most or len(run.places) == TOGETHER", "len(run.places) == TOGETHER"),
        ("if run.places and (is_full or is_flat is not run.is_flat):", "if is_full:"),
    ),
    "src/preamp/kernels/plain/ops.py": (
        ("torch.isfinite(max_abs).all()", "~torch.isinf(max_abs).any()"),
        ("y if is_one else y * by_y", "y"),
    ),
    "src/preamp/kernels/plain/slots.py": (
        ("torch.where(flag, target, value", "torch.where(flag, value, value"),
        ("start=stored.starts[place]", "start=0"),
        (
            "wanted = [pair for pair in zip(halves, params,",
            "wanted = [pair for pair in zip(halves, p.each,",
        ),
        ("return param if is_same else taken_over(param, half)", "return param"),
    ),
    "src/preamp/kernels/rules.py": (
        ("v = beta2 * v + rest * g * g", "v = beta2 * v + g * g"),
        ('"COUPLED": decays and not decoupled', '"COUPLED": decays'),
        ("m = choose(is_first, g, later)", "m = later"),
        ("share=1 - self.dampening", "share=1.0"),
        ("divide(g, root(m) + eps)", "divide(g, root(m + eps))"),
        ("    u = corrected(m, c1)\n", "    u = m\n"),
    ),
    "src/preamp/kernels/stored.py": (
        ("high = ((word + 0x8000) >> 16).to(torch.int16)", "high = (word >> 16).to(torch.int16)"),
        ("(far == 0x8000).to(torch.int16)", "(far == -0x8000).to(torch.int16)"),
        ("(ODD**row & 0xFFFF)", "1"),
        ("exponent.clamp(min=113, max=142)", "exponent.clamp(max=142)"),
        ("found[start - 8 * first :][:count]", "found[:count]"),
        ("master.to(half.dtype).view(torch.int16), half", "half.view(torch.int16), half"),
        ("(zero + step) & _WORD", "zero"),
        ("torch.where(word < lowest << 23, below, word)", "word"),
        ("torch.where(by.isfinite(), torch.where(room < 0, -value, value), torch.nan)", "value"),
        ("(w.abs() >= BEYOND_FLOAT16) & w.isfinite()", "w.abs() >= BEYOND_FLOAT16"),
    ),
    "src/preamp/optim/fused/base.py": (
        ("torch.where(is_lost, torch.ones_like(factor), factor)", "factor"),
    ),
    "src/preamp/optim/fused/entries.py": (
        ("both = factor * inv_scale.to(factor.device)", "both = factor"),
        ('if kept and kept.is_same("params", params):', "if kept:"),
        ("if kept.places is None and are_same(state, params):", "if kept.places is None:"),
        ("list(map(id, column)) == self.lists.get(name)", "name in self.lists"),
    ),
    "src/preamp/optim/fused/moments.py": (
        ("start = box_of(leaf)[0][0] * math.prod(shape[1:])", "start = 0"),
        ("numbers=kept.numbers", "numbers=[0] * len(kept.numbers)"),
    ),
    "src/preamp/optim/fused/norms.py": (
        ("if max_norm == 0 or not any(", "if not any("),
        (
            "torch.where(norm > max_norm, max_norm / norm, one) * scale",
            "torch.where(norm > max_norm, max_norm / norm, one)",
        ),
    ),
    "src/preamp/optim/gradients.py": (
        ("if not is_same or versions != self.versions or looks:", "if not is_same or looks:"),
    ),
    "src/preamp/optim/larc.py": (
        ("(norm != 0) & (grad_norm != 0)", "grad_norm != 0"),
        ("ratio = (ratio / rate_of(group)).clamp(max=1.0)", "ratio = ratio.clamp(max=1.0)"),
    ),
    "src/preamp/optim/rewritten.py": (
        ("torch.isfinite(old) != torch.isfinite(new)", "torch.isfinite(old) & False"),
        ("if misfits or not math.isfinite(factor)", "if not math.isfinite(factor)"),
    ),
    "src/preamp/optim/table.py": (
        ("len(forms[0]) == len(forms[1]) == 1", "True"),
        ("torch.where(is_same, half, now)", "now"),
        ("and value.shape == param.shape\n", ""),
    ),
    "src/preamp/scaling/scaler.py": (
        ("scale.clamp(self.floor, self.max_scale)", "scale.clamp(max=self.max_scale)"),
        ("torch.where(grows, 0, tracker)", "tracker"),
        (
            "torch.maximum(own, found_inf.to(own.device, own.dtype), out=own)",
            "own.copy_(found_inf)",
        ),
        ("done = self._rule, self.generation + 1,", "done = self._rule, self.generation,"),
        ("clamp_(self.scale, rule.floor, rule.max_scale)", "pass"),
        ("self._rule.growth_interval) - 1, 0)", "self._rule.growth_interval), 0)"),
        ("c_float(rule.backoff_factor).value", "rule.backoff_factor"),
    ),
}
