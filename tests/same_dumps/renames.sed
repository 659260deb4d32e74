# What dumps call otherwise since the build that is compared with: `s/old/new/g`.
# A reason, and what avoids it.
s/; not needed without --sp(; [0-9]+ in one bucket)?"$/\1" avoided by sp off/
s/; not needed without --zero(; [0-9]+ in one bucket)?"$/\1" avoided by zero none/
s/; not needed without recomputation(; [0-9]+ in one bucket)?"$/\1" avoided by recompute none/
s/; not needed with --pp 1, or if one stage had all of it(; [0-9]+ in one bucket)?"$/\1" avoided by one_stage/
s/; not needed with --([a-z]+) 1: its ranks see other data(; [0-9]+ in one bucket)?"$/\2" avoided by same_data \1/
s/; not needed with --([a-z]+) 1(; [0-9]+ in one bucket)?"$/\2" avoided by one_rank \1/
s/; not needed if the plan's `([a-z]+)` did not list `([^`]*)`(; [0-9]+ in one bucket)?"$/\3" avoided by unlisted \1 "\2"/
s/; not needed if the plan's `([a-z]+)` split nothing that is summed over here(; [0-9]+ in one bucket)?"$/\2" avoided by unsplit \1/
s/because "rows from a rank to a group of experts; a greater --moe-buffer-factor makes room for more"$/because "rows from a rank to a group of experts" avoided by moe_buffer greater/
